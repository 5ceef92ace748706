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

#define PW_GATE_ROW(NAME) ISA(NAME##_gate),
#define PW_ACTIVATION_ROW(NAME) ISA(NAME),

#define PW_OP_TABLE \
    { \
        .lanes = LANES, \
        .rmsnorm = ISA(rmsnorm), \
        .layernorm = ISA(layernorm), \
        .add = ISA(add), \
        .sum = ISA(sum), \
        .rope = ISA(rope), \
        .gates = {PW_EACH_GATE(PW_GATE_ROW)}, \
        .activations = {PW_EACH_ACTIVATION(PW_ACTIVATION_ROW)}, \
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
