/* families/gemm_f32.c: micro-kernels for f32 weights, for bf16 and f16 weights that are staged as such (gemm_stage.c), and for
 * f16 weights that become float32 as they are read; compiled once per ISA. */
#include "families/gemm_dense.h"

PW_TILES(f32, DENSE_TILES, dense_tile, STEP_F32)
PW_TILES(f16_widened, DENSE_TILES, dense_tile, STEP_F16)
