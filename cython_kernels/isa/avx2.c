#define PW_ISA avx2
#include "simd/avx2.h"

#include "families/all.h"
