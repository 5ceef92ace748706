#define PW_ISA avx512
#include "simd/avx512.h"
