#define PW_ISA neon
#include "simd/neon.h"
