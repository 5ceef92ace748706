#define PW_ISA avx512_vnni
#include "simd/avx512.h"
