/* families/gemm_dense.c: micro-kernels of y = x W^T for f32 and bf16 weights; compiled once per ISA.
 *
 * Each y is one chain of k multiply-adds in the order of k (bf16: pairs in the order of the ISA's dot), so
 *     |y - exact| <= gamma_(k+1) sum |x_i w_i|,   gamma_n = n u / (1 - n u), u = 2^-24   (Higham 2002, ch. 3; with
 * FMA gamma_k). For bf16 the exact y is that of the rounded x. vdpbf16ps takes subnormal inputs and results as zero:
 * up to 2^-126 (k + sum |x_i| + sum |w_i|) more. PW_ADD rounds once more, 2^-24 |y|. */
#include "families/gemm.h"

PW_INLINE void f32_step(const tile_call *t, vf *acc, int mr, int np, int64_t k, int64_t ahead) {
    const uint8_t *values = t->values + k * VECTOR_ROW_BYTES;
    vf w[MAX_TILE_PANELS * VECTORS];
    PW_UNROLL for (int p = 0; p < np; ++p) {
        __builtin_prefetch(values + p * t->panel_bytes + ahead);
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
            w[p * VECTORS + v] = vi_as_vf(vi_load(values + p * t->panel_bytes + v * LANES * 4));
        }
    }
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vf x = v_set1(float_at(t->rows + r * t->row_bytes + 4 * k));
        vf *sums = acc + r * np * VECTORS;
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) sums[c] = v_fma(x, w[c], sums[c]);
    }
}

PW_INLINE void bf16_step(const tile_call *t, vf *acc, int mr, int np, int64_t pair, int64_t ahead) {
    const uint8_t *values = t->values + pair * VECTOR_ROW_BYTES;
    vi w[MAX_TILE_PANELS * VECTORS];
    PW_UNROLL for (int p = 0; p < np; ++p) {
        __builtin_prefetch(values + p * t->panel_bytes + ahead);
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
            w[p * VECTORS + v] = vi_load(values + p * t->panel_bytes + v * LANES * 4);
        }
    }
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        va16 x = va16_load(t->rows + r * t->row_bytes, pair);
        vf *sums = acc + r * np * VECTORS;
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) sums[c] = bf16_dot(sums[c], w[c], x);
    }
}

/* The last steps ask for the next panels' first lines: a panel's own end has nothing ahead of it. */
PW_INLINE void dense_tile(const tile_call *t, int kind, int mr, int np) {
    tile_sums acc;
    begin_sums(t, acc, mr, np * VECTORS);
    int64_t step = 0, ahead = t->prefetch_bytes, turn = t->steps - ahead / VECTOR_ROW_BYTES;
    for (int half = 0; half < 2; ++half) {
        int64_t end = half ? t->steps : turn;
        for (; step < end; ++step) {
            if (kind == PW_F32) f32_step(t, acc, mr, np, step, ahead);
            else bf16_step(t, acc, mr, np, step, ahead);
        }
        ahead += t->prefetch_jump;
    }
    end_sums(t, acc, mr, np * VECTORS);
}

#define TILE(mr, np) static void f32_##mr##x##np(const tile_call *t) { dense_tile(t, PW_F32, mr, np); }
DENSE_TILES(TILE)
#undef TILE

#ifndef PW_AMX /* there, bf16 belongs to gemm_amx.c */
#define TILE(mr, np) static void bf16_##mr##x##np(const tile_call *t) { dense_tile(t, PW_BF16, mr, np); }
DENSE_TILES(TILE)
#undef TILE
#endif
