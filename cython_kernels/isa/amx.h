#define PW_ISA amx
#include "simd/amx.h"
