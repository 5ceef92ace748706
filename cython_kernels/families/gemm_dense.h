/* families/gemm_dense.h: tiles of y = x W^T for f32, f16 and bf16 weights (gemm_f32.c, gemm_bf16.c; gemm_sparse.c has the
 * steps).
 *
 * Each y is one chain of k multiply-adds in the order of k (bf16_dot: pairs in the order of the ISA's dot), so
 *     |y - exact| <= gamma_(k+1) sum |x_i w_i|,   gamma_n = n u / (1 - n u), u = 2^-24   (Higham 2002, ch. 3; with
 * FMA gamma_k). For bf16 the exact y is that of the rounded x. vdpbf16ps takes subnormal inputs and results as zero:
 * up to 2^-126 (k + sum |x_i| + sum |w_i|) more. PW_ADD rounds once more, 2^-24 |y|.
 *
 * f16: weights are widened, which is exact, and then are f32 weights: the same chain, the same bits.
 * bf16 by `fma`: weights are widened and meet float32 x, so that many rows may as well go through the f32 kernels. */
#ifndef PHASEWISE_FAMILIES_GEMM_DENSE_H
#define PHASEWISE_FAMILIES_GEMM_DENSE_H

#include "families/gemm_tiles.h"

typedef enum { STEP_F32, STEP_F16, STEP_BF16_FMA, STEP_BF16_DOT } dense_step;

/* Bytes of a panel that a step reads, and steps that a line of it holds. */
PW_INLINE int step_bytes(dense_step kind) { return kind == STEP_F16 ? VECTOR_ROW_BYTES / 2 : VECTOR_ROW_BYTES; }
PW_INLINE int steps_of_line(dense_step kind) { return VECTOR_ROW_BYTES / step_bytes(kind); }

/* Where the rows of a tile are read: every fifth one has a pointer. */
typedef struct {
    const uint8_t *fifth[MAX_MR / 5 + 1];
    int64_t bytes, thrice;
} row_pointers;

PW_INLINE row_pointers point_to_rows(const tile_call *t, int mr) {
    row_pointers x = {.bytes = t->row_bytes, .thrice = 3 * t->row_bytes};
    PW_UNROLL for (int i = 0; i < mr; i += 5) x.fifth[i / 5] = t->rows + i * x.bytes;
    return x;
}

/* The compiler forgets how these pointers hang together, and does not keep one for each row and step. */
PW_INLINE void hide_rows(row_pointers *x, int mr) {
    PW_UNROLL for (int i = 0; i < mr; i += 5) PW_HIDE(x->fifth[i / 5]);
    PW_HIDE(x->bytes);
    PW_HIDE(x->thrice);
}

PW_INLINE void advance_rows(row_pointers *x, int mr, int bytes) {
    PW_UNROLL for (int i = 0; i < mr; i += 5) x->fifth[i / 5] += bytes;
}

PW_INLINE const uint8_t *row_at(const row_pointers *x, int r) {
    const uint8_t *fifth = x->fifth[r / 5];
    return r % 5 == 3 ? fifth + x->thrice : fifth + r % 5 * x->bytes;
}

/* One input of each row, at a byte offset from the pointers, times `count` of the vectors. */
PW_INLINE void f32_step_of(const row_pointers *x, int offset, const vi *w, vf *acc, int mr, int vectors, int count) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vf factor = v_set1(float_at(row_at(x, r) + offset));
        PW_UNROLL for (int c = 0; c < count; ++c) {
            acc[r * vectors + c] = v_fma_in_place(factor, vi_as_vf(w[c]), acc[r * vectors + c]);
        }
    }
}

PW_INLINE void f32_step(const row_pointers *x, int offset, const vi *w, vf *acc, int mr, int vectors) {
    f32_step_of(x, offset, w, acc, mr, vectors, vectors);
}

/* One input after the other, so that one half of the widened weights is in registers at a time; of one panel where the sums leave
 * no room for more, whose rows are broadcast anew for each panel. */
PW_INLINE void bf16_fma_step(const row_pointers *x, int offset, const vi *w, vf *acc, int mr, int vectors) {
    int together = (mr + 1) * vectors > DENSE_HELD + 3 ? VECTORS : vectors;
    vi half[MAX_TILE_PANELS * VECTORS];
    row_pointers rows = *x;
    PW_UNROLL for (int first = 0; first < vectors; first += together) {
        if (together < vectors) hide_rows(&rows, mr);
        PW_UNROLL for (int c = 0; c < together; ++c) half[c] = vi_shl(w[first + c], 16);
        f32_step_of(&rows, offset, half, acc + first, mr, vectors, together);
        PW_UNROLL for (int c = 0; c < together; ++c) half[c] = vi_and(w[first + c], vi_set1((int32_t)0xFFFF0000));
        f32_step_of(&rows, offset + 4, half, acc + first, mr, vectors, together);
    }
}

#ifdef PW_BF16_DOT_WORDS
PW_INLINE void bf16_dot_step(const row_pointers *x, int offset, const vi *w, vf *acc, int mr, int vectors) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vi pair = vi_set1(int_at(row_at(x, r) + offset));
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            acc[r * vectors + c] = bf16_dot(acc[r * vectors + c], w[c], pair);
        }
    }
}
#endif

/* Vector row `w` of each panel, step `step` from where the rows' pointers are. */
PW_INLINE void dense_rows(dense_step kind, const vi *w, const row_pointers *x, int step, vf *acc, int mr, int np) {
    if (kind == STEP_F32 || kind == STEP_F16) f32_step(x, 4 * step, w, acc, mr, np * VECTORS);
    if (kind == STEP_BF16_FMA) bf16_fma_step(x, 8 * step, w, acc, mr, np * VECTORS);
#ifdef PW_BF16_DOT_WORDS
    if (kind == STEP_BF16_DOT) bf16_dot_step(x, 4 * step, w, acc, mr, np * VECTORS);
#endif
}

/* Step `step` from where the pointers are. */
PW_INLINE void dense_one(const tile_call *t, dense_step kind, const uint8_t *values, const row_pointers *x, int step,
                         vf *acc, int mr, int np) {
    vi w[MAX_TILE_PANELS * VECTORS];
    PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
        int bytes = step_bytes(kind);
        const uint8_t *from = values + c / VECTORS * t->panel_bytes + c % VECTORS * bytes / VECTORS + step * bytes;
        w[c] = kind == STEP_F16 ? v_bits(v_load_f16((const uint16_t *)(const void *)from)) : vi_load(from);
    }
    dense_rows(kind, w, x, step, acc, mr, np);
}

/* What TALL_STEPS steps ask for. */
PW_INLINE void ask_ahead(const lookahead *next, const uint8_t *x, int64_t row_bytes, int np) {
    for (int64_t at = 0; at < TALL_STEPS * next->values_step; at += VECTOR_ROW_BYTES) {
        PW_UNROLL for (int p = 0; p < np; ++p) ask_for(next->values + p * next->panel_bytes + at, next->far);
    }
    __builtin_prefetch(x + next->rows_ahead);
    __builtin_prefetch(x + next->rows_ahead + row_bytes);
}

/* A tile whose sums fit into registers. */
PW_INLINE void dense_held(const tile_call *t, dense_step kind, int mr, int np) {
    tile_sums acc;
    int tall_bytes = TALL_STEPS * step_bytes(kind), x_bytes = kind == STEP_BF16_FMA ? 8 : 4, together = steps_of_line(kind);
    lookahead next = t->next;
    row_pointers x = point_to_rows(t, mr);
    const uint8_t *values = t->values, *end = values + t->steps / together * VECTOR_ROW_BYTES;
    begin_sums(t, acc, mr, np * VECTORS);
    for (const uint8_t *stop = last_read(t, end); values < end; stop = end, next.values += t->prefetch_jump) {
        for (; mr >= TALL_MR && stop - values >= tall_bytes; values += tall_bytes) {
            ask_ahead(&next, x.fifth[0], x.bytes, np);
            next.values += TALL_STEPS * next.values_step;
            PW_UNROLL for (int step = 0; step < TALL_STEPS; ++step) {
                hide_rows(&x, mr);
                dense_one(t, kind, values, &x, step, acc, mr, np);
            }
            advance_rows(&x, mr, TALL_STEPS * x_bytes);
        }
        for (; values < stop; values += VECTOR_ROW_BYTES, next.values += together * next.values_step) {
            PW_UNROLL for (int p = 0; p < np; ++p) ask_for(next.values + p * next.panel_bytes, next.far);
            PW_UNROLL for (int step = 0; step < together; ++step) dense_one(t, kind, values, &x, step, acc, mr, np);
            advance_rows(&x, mr, together * x_bytes);
        }
    }
    if (t->steps % together) dense_one(t, kind, values, &x, 0, acc, mr, np);
    end_sums(t, acc, mr, np * VECTORS);
}

/* Where its sums do not fit, a tile takes panel after panel. It is for strips whose other tiles have fewer rows: these wait for
 * each other's sums in one panel, and do not in two. */
PW_INLINE void dense_tile(const tile_call *t, dense_step kind, int mr, int np) {
    if (mr * np * VECTORS <= DENSE_HELD) {
        dense_held(t, kind, mr, np);
        return;
    }
    tile_call panel = *t;
    panel.panels = 1;
    if (t->prefetch_jump) panel.prefetch_jump -= (np - 1) * t->panel_bytes;
    for (int p = 0; p < np; ++p) {
        dense_held(&panel, kind, mr, 1);
        panel.values += t->panel_bytes;
        panel.next.values += t->next.panel_bytes;
        panel.out += PW_PANEL;
        if (t->partial) panel.partial += PW_PANEL;
    }
}

#endif
