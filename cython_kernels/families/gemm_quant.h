/* What tiles of integer dots share: groups of quantised rows and weights, their scales, and columns with one scale
 * (gemm_quant.c, gemm_blocks.c, gemm_blockwise.c, gemm_sparse.c, gemm_amx.c). The bounds are in gemm_quant.c. */
#ifndef PHASEWISE_FAMILIES_GEMM_QUANT_H
#define PHASEWISE_FAMILIES_GEMM_QUANT_H

#include "families/gemm_tiles.h"

typedef vi int_sums[MAX_MR][MAX_TILE_PANELS * VECTORS];

/* Where one group of a tile is read. */
typedef struct {
    int kind, group;
    const uint8_t *values;       /* first panel's first vector row */
    const uint8_t *const *rows;  /* each row's activations */
    int64_t fields_at;           /* bytes from there to scale, bias and scaled sum */
    int64_t scales_at;           /* bytes from a panel's first scale */
} group_place;

PW_INLINE void point_to_blocks(const tile_call *t, const uint8_t **rows, int mr) {
    PW_UNROLL for (int r = 0; r < mr; ++r) rows[r] = t->rows + r * t->row_bytes;
}

/* The pointers moved on by a byte offset. Dots that broadcast an operand from memory want a pointer for each row: with an index register the
 * core takes them apart again. So the compiler forgets how the pointers hang together. */
PW_INLINE void advance_blocks(const uint8_t **rows, int mr, int64_t bytes) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        rows[r] += bytes;
        if (PW_DOT_OPERANDS) PW_HIDE(rows[r]);
    }
}

/* Whether the dots of row r broadcast their operand: fewer instructions, but a load for each panel, of two a cycle. */
PW_INLINE int broadcasts(int r, int np) { return PW_DOT_OPERANDS && (np == 1 || (np <= 3 && r % 2)); }

PW_INLINE void q8_row(vi *dot, const vi *w, const uint8_t *row, int quad, int vectors, int broadcast) {
    if (broadcast) {
        PW_UNROLL for (int c = 0; c < vectors; ++c) dot[c] = dot_at(dot[c], w[c], row + 4 * quad);
        return;
    }
    va8 x = va8_load(row, quad);
    PW_UNROLL for (int c = 0; c < vectors; ++c) dot[c] = q8_dot(dot[c], w[c], x);
}

PW_INLINE void q4_row(vi *dot, const vi *w, const uint8_t *row, int i, int vectors, int broadcast) {
    vi nibble = vi_set1(0x0F0F0F0F);
    if (broadcast) {
        PW_UNROLL for (int c = 0; c < vectors; ++c) dot[c] = dot_at(dot[c], vi_and(w[c], nibble), row + 8 * i);
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            dot[c] = dot_at(dot[c], vi_and(vi_shr(w[c], 4), nibble), row + 8 * i + 4);
        }
        return;
    }
    va4 low = va4_load(row, 2 * i), high = va4_load(row, 2 * i + 1);
    PW_UNROLL for (int c = 0; c < vectors; ++c) dot[c] = q4_dot(dot[c], vi_and(w[c], nibble), low);
    PW_UNROLL for (int c = 0; c < vectors; ++c) dot[c] = q4_dot(dot[c], vi_and(vi_shr(w[c], 4), nibble), high);
}

/* Vector row i of each panel, `w`: four inputs of q8, or twice four of q4. */
PW_INLINE void quant_rows(int_sums dot, const vi *w, const group_place *at, int mr, int np, int i) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        if (at->kind == PW_Q8) q8_row(dot[r], w, at->rows[r], i, np * VECTORS, broadcasts(r, np));
        else q4_row(dot[r], w, at->rows[r], i, np * VECTORS, broadcasts(r, np));
    }
}

PW_INLINE void load_scales(const tile_call *t, const uint8_t *scales, int64_t at, int vectors, vf *out) {
    PW_UNROLL for (int c = 0; c < vectors; ++c) {
        const uint8_t *p = scales + (c / VECTORS) * t->panel_scale_bytes + at;
        int lane = (c % VECTORS) * LANES;
        if (t->scale_bytes == 2) out[c] = v_load_f16((const uint16_t *)(const void *)p + lane);
        else out[c] = v_load((const float *)(const void *)p + lane);
    }
}

/* A group's C + D. */
PW_INLINE vf finished(int_sums dot, const group_place *at, int r, int c) {
    if (at->kind != PW_Q4) return vi_as_vf(dot[r][c]);
    return vi_as_vf(q4_end(dot[r][c], int_at(at->rows[r] + at->fields_at + 4)));
}

/* acc += a (s D) by two FMAs, of which the first takes off C s, exact. */
PW_INLINE void scale_fused(const tile_call *t, vf *acc, int_sums dot, const group_place *at, int mr, int vectors) {
    vf s[MAX_TILE_PANELS * VECTORS], offset[MAX_TILE_PANELS * VECTORS];
    load_scales(t, t->scales, at->scales_at, vectors, s);
    PW_UNROLL for (int c = 0; c < vectors; ++c) {
        int64_t place = (c / VECTORS) * t->panel_scale_bytes + at->scales_at + (c % VECTORS) * LANES * 4;
        offset[c] = t->offsets ? vi_as_vf(vi_load(t->offsets + place)) : v_mul(v_set1(-FLOAT_BIAS), s[c]);
    }
    PW_UNROLL for (int c = 0; c < vectors; ++c) {
        PW_UNROLL for (int r = 0; r < mr; ++r) {
            vf a = v_set1(float_at(at->rows[r] + at->fields_at));
            acc[r * vectors + c] = v_fma(v_fma(finished(dot, at, r, c), s[c], offset[c]), a, acc[r * vectors + c]);
        }
    }
}

PW_INLINE void scale_plain(const tile_call *t, vf *acc, int_sums dot, const group_place *at, int mr, int vectors) {
    vf s[MAX_TILE_PANELS * VECTORS], bias = v_set1(FLOAT_BIAS);
    load_scales(t, t->scales, at->scales_at, vectors, s);
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vf a = v_set1(float_at(at->rows[r] + at->fields_at));
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            vf exact = v_sub(finished(dot, at, r, c), bias);
            acc[r * vectors + c] = v_fma(v_mul(exact, s[c]), a, acc[r * vectors + c]);
        }
    }
}

/* acc += a (s D) for one group, then += (a sum q) m where there are minima. */
PW_INLINE void scale_group(const tile_call *t, vf *acc, int_sums dot, const group_place *at, int mr, int vectors) {
    if (t->offsets || (PW_FMA_ROUNDS_ONCE && t->scale_bytes == 2)) scale_fused(t, acc, dot, at, mr, vectors);
    else scale_plain(t, acc, dot, at, mr, vectors);
    if (!t->mins) return;
    vf m[MAX_TILE_PANELS * VECTORS];
    load_scales(t, t->mins, at->scales_at, vectors, m);
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vf scaled_sum = v_set1(float_at(at->rows[r] + at->fields_at + 8));
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            acc[r * vectors + c] = v_fma(scaled_sum, m[c], acc[r * vectors + c]);
        }
    }
}

PW_INLINE void begin_dots(int_sums dot, const group_place *at, int mr, int np) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        int32_t bias = int_at(at->rows[r] + at->fields_at + 4);
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
            dot[r][c] = at->kind == PW_Q8 ? q8_begin(bias) : q4_begin(bias);
        }
    }
}

/* A group's share of the next strip's weights, and what the next tile of rows reads of this one's rows. */
PW_INLINE void ask_ahead_of_group(const lookahead *next, const uint8_t *const *rows, int mr, int np, int64_t step) {
    const uint8_t *values = next->values + step * next->values_step;
    for (int64_t at = 0; at < next->values_step; at += VECTOR_ROW_BYTES) {
        PW_UNROLL for (int p = 0; p < np; ++p) ask_for(values + p * next->panel_bytes + at, next->far);
    }
    PW_UNROLL for (int r = 0; r < mr; ++r) __builtin_prefetch(rows[r] + next->rows_ahead);
}

/* The lines that a tile's sums go to, long before they do. */
PW_INLINE void ask_for_out(const tile_call *t, int mr, int np) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        PW_UNROLL for (int p = 0; p < np; ++p) __builtin_prefetch(t->out + r * t->out_stride + p * PW_PANEL, 1);
    }
}

/* What the zero point takes from D of these steps, for row r. */
PW_INLINE vi column_bias(const tile_call *t, int r) {
    const uint8_t *biases = t->row_biases + r * t->row_bytes;
    return vi_set1((int32_t)((uint32_t)int_at(biases + 4 * t->steps) - (uint32_t)int_at(biases)));
}

PW_INLINE void begin_columns(const tile_call *t, int_sums dot, int mr, int np) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vi bias = column_bias(t, r);
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
            const float *before = t->partial + r * t->partial_stride + c * LANES;
            dot[r][c] = t->partial ? vi_add(vi_load(before), bias) : bias;
        }
    }
}

PW_INLINE void store_column_sums(const tile_call *t, int_sums dot, int mr, int vectors) {
    PW_UNROLL for (int i = 0; i < mr * vectors; ++i) {
        vi_store(t->out + (i / vectors) * t->out_stride + (i % vectors) * LANES, dot[i / vectors][i % vectors]);
    }
}

PW_INLINE void scale_columns(const tile_call *t, int_sums dot, int mr, int vectors) {
    vf s[MAX_TILE_PANELS * VECTORS];
    load_scales(t, t->scales, 0, vectors, s);
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vf a = v_set1(float_at(t->row_scales + r * t->row_bytes));
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            float *out = t->out + r * t->out_stride + c * LANES;
            vf sum = v_mul(v_mul(a, s[c]), vi_to_vf(dot[r][c]));
            v_store(out, t->add ? v_add(v_load(out), sum) : sum);
        }
    }
}

PW_INLINE void end_columns(const tile_call *t, int_sums dot, int mr, int np) {
    if (t->ends_part) scale_columns(t, dot, mr, np * VECTORS);
    else store_column_sums(t, dot, mr, np * VECTORS);
}

#endif
