/* families/ops.c: rows of floats, everything beside products and attention; compiled once per ISA. */
#include "families/exp.h"
#include "families/sixteen.h"
#include "families/slots.h"

/* y[i] = an expression of LOAD(x + i) for every i < n, of any alignment: LANES at once, then what is left. */
#define LOAD(p) lanes_of(p, count)
#define EACH_ELEMENT(n, y, ...)                                                  \
    do {                                                                         \
        int64_t i = 0;                                                           \
        for (const int count = LANES; i + LANES <= (n); i += LANES) v_store((y) + i, __VA_ARGS__); \
        const int count = (int)((n) - i);                                        \
        if (count > 0) v_store_n((y) + i, __VA_ARGS__, count);                   \
    } while (0)
PW_INLINE vf lanes_of(const float *p, int count) { return count == LANES ? v_load(p) : v_load_n(p, count); }

#include "families/rows/rmsnorm.c"
#include "families/rows/rope.c"
#include "families/rows/gelu.h"
#include "families/rows/elementwise.c"
#include "families/rows/activations.c"
#include "families/rows/layernorm.c"
#include "families/rows/low_rank.c"
#include "families/rows/recurrence.c"
#include "families/rows/softmax.c"
