#define PW_ISA avx2
#include "simd/avx2.h"
