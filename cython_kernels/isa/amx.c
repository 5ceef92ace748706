#define PW_ISA amx
#include "simd/amx.h"

#include "families/all.h"
