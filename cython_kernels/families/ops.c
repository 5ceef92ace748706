/* families/ops.c: rows of floats, everything beside products and attention; compiled once per ISA. */
#include "families/exp.h"
#include "families/sixteen.h"
#include "families/slots.h"

#include "families/rows/rmsnorm.c"
#include "families/rows/rope.c"
#include "families/rows/gelu.h"
#include "families/rows/elementwise.c"
#include "families/rows/activations.c"
#include "families/rows/layernorm.c"
#include "families/rows/low_rank.c"
#include "families/rows/recurrence.c"
#include "families/rows/softmax.c"
