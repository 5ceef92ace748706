#define PW_ISA avx512_bf16
#include "simd/avx512.h"
