/* families/table.c: the table of one instruction set. */
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
#define GATE(NAME) [PW_GATE_##NAME] = ISA(NAME##_gate),
#define ACTIVATION(NAME) [PW_ACT_##NAME] = ISA(NAME),

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
            PW_OP_SLOTS(SLOT)
            .gates = {PW_EACH_GATE(GATE)},
            .activations = {PW_EACH_ACTIVATION(ACTIVATION)},
        },
};
