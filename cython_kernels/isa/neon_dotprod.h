#define PW_ISA neon_dotprod
#include "simd/neon.h"
