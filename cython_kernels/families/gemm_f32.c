/* families/gemm_f32.c: micro-kernels for f32 weights, and for bf16 weights that are staged as such (gemm_stage.c); compiled
 * once per ISA. */
#include "families/gemm_dense.h"

PW_TILES(f32, DENSE_TILES, dense_tile, STEP_F32)
