#define PW_ISA avx_vnni
#include "simd/avx2.h"
