#define PW_ISA portable
#include "simd/portable.h"

#include "families/all.h"
