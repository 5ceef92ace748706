/* families/gemm_bf16.c: micro-kernels for bf16 weights; compiled once per ISA. */
#include "families/gemm_dense.h"

PW_TILES(bf16_fma, DENSE_TILES, dense_tile, STEP_BF16_FMA)
#ifdef PW_BF16_DOT_WORDS
PW_TILES(bf16_dot, DENSE_TILES, dense_tile, STEP_BF16_DOT)
#endif
