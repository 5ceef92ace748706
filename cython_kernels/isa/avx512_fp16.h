#define PW_ISA avx512_fp16
#include "simd/avx512.h"
