#define PW_ISA neon_bf16_i8mm
#include "simd/neon.h"
