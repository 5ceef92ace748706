/* The functions of one instruction set that fill the slots of the dispatch table (dispatch.h): each by its slot's name and
 * type, which its definition then has to have. */
#ifndef PHASEWISE_FAMILIES_SLOTS_H
#define PHASEWISE_FAMILIES_SLOTS_H

#include "dispatch.h"

#define PW_GEMM_SLOTS(X)                                                                            \
    X(row_bytes) X(prepare_rows) X(gemm) X(path_of) X(best_tile) X(has_tile) X(reads_blocks) X(unpack_row)
#define PW_LIMIT_SLOTS(X) X(f32) X(f16) X(bf16) X(int8) X(read)
#define PW_OP_SLOTS(X)                                                                              \
    X(rmsnorm) X(layernorm) X(add) X(sum) X(rope) X(cap) X(add_scaled) X(add_low_rank) X(scale) X(exponential) \
    X(convolve) X(multiply) X(recur) X(softmax) X(store_key) \
    X(store_value) X(prepare_queries) X(attend_chunk) X(score_keys) X(begin) X(merge) X(finish) X(argmax) X(logsumexp) X(top_k)

#define PW_GEMM_FUNCTION(name) __typeof__(*((pw_gemm_kernels *)0)->name) ISA(name);
#define PW_LIMIT_FUNCTION(name) __typeof__(*((pw_limit_kernels *)0)->name) ISA(limit_##name);
#define PW_OP_FUNCTION(name) __typeof__(*((pw_op_kernels *)0)->name) ISA(name);
#define PW_GATE_FUNCTION(NAME) __typeof__(*((pw_op_kernels *)0)->gates[0]) ISA(NAME##_gate);
#define PW_ACTIVATION_FUNCTION(NAME) __typeof__(*((pw_op_kernels *)0)->activations[0]) ISA(NAME);
PW_GEMM_SLOTS(PW_GEMM_FUNCTION)
PW_LIMIT_SLOTS(PW_LIMIT_FUNCTION)
PW_OP_SLOTS(PW_OP_FUNCTION)
PW_EACH_GATE(PW_GATE_FUNCTION)
PW_EACH_ACTIVATION(PW_ACTIVATION_FUNCTION)

#endif
