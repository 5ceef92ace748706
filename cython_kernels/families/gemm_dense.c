/* families/gemm_dense.c: micro-kernels of y = x W^T for f32 and bf16 weights; compiled once per ISA.
 *
 * Each y is one chain of k multiply-adds in the order of k (bf16_dot: pairs in the order of the ISA's dot), so
 *     |y - exact| <= gamma_(k+1) sum |x_i w_i|,   gamma_n = n u / (1 - n u), u = 2^-24   (Higham 2002, ch. 3; with
 * FMA gamma_k). For bf16 the exact y is that of the rounded x. vdpbf16ps takes subnormal inputs and results as zero:
 * up to 2^-126 (k + sum |x_i| + sum |w_i|) more. PW_ADD rounds once more, 2^-24 |y|.
 *
 * bf16 by `fma`: weights are widened and meet float32 x, so that many rows may as well go through the f32 kernels. */
#include "families/gemm.h"

typedef enum { STEP_F32, STEP_BF16_FMA, STEP_BF16_DOT } dense_step;

/* x: one input of the first row, or a pair of them. */
PW_INLINE void f32_step(const uint8_t *x, int64_t row_bytes, const vi *w, vf *acc, int mr, int vectors) {
    PW_UNROLL for (int r = 0; r < mr; ++r, x += row_bytes) {
        vf factor = v_set1(float_at(x));
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            acc[r * vectors + c] = v_fma(factor, vi_as_vf(w[c]), acc[r * vectors + c]);
        }
    }
}

/* One input after the other, so that one half of the widened weights is in registers at a time. */
PW_INLINE void bf16_fma_step(const uint8_t *x, int64_t row_bytes, const vi *w, vf *acc, int mr, int vectors) {
    vi half[MAX_TILE_PANELS * VECTORS];
    PW_UNROLL for (int c = 0; c < vectors; ++c) half[c] = vi_shl(w[c], 16);
    f32_step(x, row_bytes, half, acc, mr, vectors);
    PW_UNROLL for (int c = 0; c < vectors; ++c) half[c] = vi_and(w[c], vi_set1((int32_t)0xFFFF0000));
    f32_step(x + 4, row_bytes, half, acc, mr, vectors);
}

#ifdef PW_BF16_DOT_WORDS
PW_INLINE void bf16_dot_step(const uint8_t *x, int64_t row_bytes, const vi *w, vf *acc, int mr, int vectors) {
    PW_UNROLL for (int r = 0; r < mr; ++r, x += row_bytes) {
        vi pair = vi_set1(int_at(x));
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            acc[r * vectors + c] = bf16_dot(acc[r * vectors + c], w[c], pair);
        }
    }
}
#endif

enum { TALL_MR = 5 }; /* fewer rows stream weights; more come in several tiles, and their inputs are worth asking for */

PW_INLINE void dense_tile(const tile_call *t, dense_step kind, int mr, int np) {
    tile_sums acc;
    int x_bytes = kind == STEP_BF16_FMA ? 8 : 4;
    int64_t panel_bytes = t->panel_bytes, row_bytes = t->row_bytes;
    lookahead next = t->next;
    const uint8_t *values = t->values, *x = t->rows, *end = values + t->steps * VECTOR_ROW_BYTES;
    begin_sums(t, acc, mr, np * VECTORS);
    for (const uint8_t *stop = end - t->prefetch_bytes; values < end; stop = end, next.values += t->prefetch_jump) {
        for (; values < stop; values += VECTOR_ROW_BYTES, x += x_bytes) {
            vi w[MAX_TILE_PANELS * VECTORS];
            PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
                w[c] = vi_load(values + c / VECTORS * panel_bytes + c % VECTORS * LANES * 4);
            }
            PW_UNROLL for (int p = 0; p < np; ++p) __builtin_prefetch(next.values + p * next.panel_bytes);
            next.values += next.values_step;
            if (mr >= TALL_MR) {
                __builtin_prefetch(x + next.rows_ahead);
                __builtin_prefetch(x + next.rows_ahead + row_bytes);
            }
            if (kind == STEP_F32) f32_step(x, row_bytes, w, acc, mr, np * VECTORS);
            if (kind == STEP_BF16_FMA) bf16_fma_step(x, row_bytes, w, acc, mr, np * VECTORS);
#ifdef PW_BF16_DOT_WORDS
            if (kind == STEP_BF16_DOT) bf16_dot_step(x, row_bytes, w, acc, mr, np * VECTORS);
#endif
        }
    }
    end_sums(t, acc, mr, np * VECTORS);
}

#define TILE(mr, np)                                                                           \
    static void f32_##mr##x##np(const tile_call *t) { dense_tile(t, STEP_F32, mr, np); }       \
    static void bf16_fma_##mr##x##np(const tile_call *t) { dense_tile(t, STEP_BF16_FMA, mr, np); }
DENSE_TILES(TILE)
#undef TILE

#ifdef PW_BF16_DOT_WORDS
#define TILE(mr, np) static void bf16_dot_##mr##x##np(const tile_call *t) { dense_tile(t, STEP_BF16_DOT, mr, np); }
DENSE_TILES(TILE)
#undef TILE
#endif
