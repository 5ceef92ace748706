#define PW_ISA neon
#include "simd/neon.h"

#include "families/all.h"
