/* Everything beside the matrix products, for one ISA; included by isa/<name>.c after its vocabulary. */
#include "ops.h"

#include "families/exp.h"
#include "families/sixteen.h"
#include "families/rows/rmsnorm.c"
#include "families/rows/rope.c"
#include "families/rows/elementwise.c"
#include "families/rows/activations.c"
#include "families/rows/layernorm.c"
#include "families/softmax.c"
#include "families/attention.c"
#include "families/attention_cache.c"

#define PW_OP_TABLE \
    { \
        .lanes = LANES, \
        .rmsnorm = ISA(rmsnorm), \
        .layernorm = ISA(layernorm), \
        .add = ISA(add), \
        .sum = ISA(sum), \
        .rope = ISA(rope), \
        .gates = {ISA(silu_gate), ISA(gelu_gate), ISA(clamped_gate)}, \
        .activations = {ISA(gelu_erf), ISA(gelu_tanh), ISA(silu), ISA(relu)}, \
        .cap = ISA(cap), \
        .add_scaled = ISA(add_scaled), \
        .scale = ISA(scale), \
        .exponential = ISA(exponential), \
        .softmax = ISA(softmax), \
        .store_key = ISA(store_key), \
        .store_value = ISA(store_value), \
        .prepare_queries = ISA(prepare_queries), \
        .attend_chunk = ISA(attend_chunk), \
        .begin = ISA(begin), \
        .merge = ISA(merge), \
        .finish = ISA(finish), \
        .argmax = ISA(argmax), \
        .logsumexp = ISA(logsumexp), \
        .top_k = ISA(top_k), \
    }
