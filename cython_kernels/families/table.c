/* families/table.c: the table of one instruction set. */
#include "families/attention/pairs.h"
#include "families/slots.h"

#define PW_QUOTE_(name) #name
#define PW_QUOTE(name) PW_QUOTE_(name)

/* setup.py defines these. Timings of an object that something else compiled match no others. */
#ifndef PW_GEMM_ABI
#define PW_GEMM_ABI "gemm-" PW_QUOTE(PW_ISA) "-unnamed"
#define PW_ATTENTION_ABI "attention-" PW_QUOTE(PW_ISA) "-unnamed"
#endif

#define SLOT(name) .name = ISA(name),
#define LIMIT(name) .name = ISA(limit_##name),
#define NUMBERED(kernel, name) [PW_##kernel] = ISA(kernel),

extern const pw_kernels ISA(kernels);
const pw_kernels ISA(kernels) = {
    .isa = PW_QUOTE(PW_ISA),
    .gemm_abi = PW_GEMM_ABI,
    .attention_abi = PW_ATTENTION_ABI,
    .gemm = {PW_GEMM_SLOTS(SLOT)},
    .limits = {PW_LIMIT_SLOTS(LIMIT)},
    .ops =
        {
            .lanes = LANES,
            .multiplies_pairs = ATTEND_PAIRS,
            PW_OP_SLOTS(SLOT)
            .gates = {PW_EACH_GATE(NUMBERED)},
            .activations = {PW_EACH_ACTIVATION(NUMBERED)},
        },
};
