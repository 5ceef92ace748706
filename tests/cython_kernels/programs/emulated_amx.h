/* isa/amx.h over emulated tiles, for any CPU. */
#define PW_ISA amx
#include "emulated_tiles.h"
