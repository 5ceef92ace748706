#define PW_ISA portable
#include "simd/portable.h"
