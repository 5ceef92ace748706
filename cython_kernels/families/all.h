/* Every kernel family, then the table of one ISA. An isa/<name>.c defines PW_ISA and its vocabulary before this. */
#include "families/gemm_dense.c"
#include "families/gemm_f16.c"
#include "families/gemm_quant.c"
#include "families/gemm_blocks.c"
#include "families/gemm_blockwise.c"
#include "families/gemm_expand.c"
#include "families/gemm_sparse.c"
#include "families/quantise.c"
#ifdef PW_AMX
#include "families/gemm_amx.c"
#endif
#include "families/gemm_stage.c"
#include "families/gemm.c"
#include "families/limits.c"
#include "families/ops.c"

#define PW_QUOTE_(name) #name
#define PW_QUOTE(name) PW_QUOTE_(name)

/* setup.py defines these. Timings of an object that something else compiled match no others. */
#ifndef PW_GEMM_ABI
#define PW_GEMM_ABI "gemm-" PW_QUOTE(PW_ISA) "-unnamed"
#define PW_ATTENTION_ABI "attention-" PW_QUOTE(PW_ISA) "-unnamed"
#endif

extern const pw_kernels ISA(kernels);
const pw_kernels ISA(kernels) = {
    .isa = PW_QUOTE(PW_ISA),
    .gemm_abi = PW_GEMM_ABI,
    .attention_abi = PW_ATTENTION_ABI,
    .gemm =
        {
            .row_bytes = ISA(row_bytes),
            .prepare_rows = ISA(prepare_rows),
            .gemm = ISA(gemm),
            .path_of = ISA(path_of),
            .best_tile = ISA(best_tile),
            .has_tile = ISA(has_tile),
            .reads_blocks = ISA(reads_blocks),
            .unpack_row = ISA(unpack_row),
        },
    .limits =
        {
            .f32 = ISA(limit_f32),
            .f16 = ISA(limit_f16),
            .bf16 = ISA(limit_bf16),
            .int8 = ISA(limit_int8),
            .read = ISA(limit_read),
        },
    .ops = PW_OP_TABLE,
};
