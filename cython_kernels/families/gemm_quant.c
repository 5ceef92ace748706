/* families/gemm_quant.c: micro-kernels of y = x W^T for q8 and q4 weights; compiled once per ISA.
 *
 * Group g of a row holds x ~ a q (a = max|x| / 127), group g of a column w = s (v - z) + m. Per group, in the order
 * of k:   y += a (s D),  D = sum v q - z sum q;   then, with minima,   y += (a sum q) * m.
 * D is exact in int32 (|D| <= 32 * 255 * 127 < 2^20, exact in float32 too), the same on every ISA. Of the float part
 * each term rounds at most twice before it is added (s D or a sum q; the product where there is no FMA), each of the
 * G groups adds once, or twice with minima:
 *     |y - exact| <= gamma_(2 G + 2) sum_g (|a s D| + |a sum q m|)
 * against the exact y of the quantised x and w. Quantising x itself costs at most a/2 (1 + 2^-14) |w| per input.
 *
 * Sums begin at FLOAT_BIAS_BITS, the bits of 2^23 + 2^22 = C: read as a float32, a finished sum is C + D, so no
 * instruction converts it. Where C s is exact (always for float16 scales) one FMA takes it off, and rounds what a
 * multiplication would have rounded: s (C + D) - C s = s D. A group of 32 then costs 8 dots and 2 FMAs a vector: at
 * most 80 % of the dots' peak where both use the same ports, 73 % with minima.
 * q4 words of ISAs without VNNI add a group in sixteen bits: 8 quads of 2 * 15 * 127 stay below 2^15. */
#include "families/gemm_quant.h"

PW_INLINE void quant_step(const tile_call *t, int_sums dot, const group_place *at, int mr, int np, int i) {
    vi w[MAX_TILE_PANELS * VECTORS];
    PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
        int64_t offset = (c / VECTORS) * t->panel_bytes + (c % VECTORS) * LANES * 4;
        w[c] = vi_load(at->values + offset + i * VECTOR_ROW_BYTES);
    }
    quant_rows(dot, w, at, mr, np, i);
}

/* Values `ahead` in each panel; scales and minima, too short a run for the hardware to notice, of the next panels. */
PW_INLINE void prefetch_group(const tile_call *t, const group_place *at, int steps, int np, int64_t ahead) {
    PW_UNROLL for (int i = 0; i < steps * np; ++i) {
        ask_for(at->values + (i % np) * t->panel_bytes + (i / np) * VECTOR_ROW_BYTES + ahead, t->next.far);
    }
    PW_UNROLL for (int p = np; p < 2 * np; ++p) {
        __builtin_prefetch(t->scales + p * t->panel_scale_bytes + at->scales_at);
        if (t->mins) __builtin_prefetch(t->mins + p * t->panel_scale_bytes + at->scales_at);
    }
}

PW_INLINE void quant_group(const tile_call *t, vf *acc, const group_place *at, int mr, int np, int64_t ahead) {
    int steps = at->group / pw_inputs_of_row(at->kind);
    int_sums dot;
    begin_dots(dot, at, mr, np);
    if (ahead) prefetch_group(t, at, steps, np, ahead);
    PW_UNROLL for (int i = 0; i < steps; ++i) quant_step(t, dot, at, mr, np, i);
    scale_group(t, acc, dot, at, mr, np * VECTORS);
}

/* A large tile's integer sums fill the registers; its float sums wait in L1 between groups. The barrier keeps the
 * compiler from loading them early and spilling the others. */
PW_INLINE void quant_tile(const tile_call *t, int kind, int group, int mr, int np) {
    tile_sums acc;
    int64_t group_bytes = group / pw_inputs_of_row(kind) * VECTOR_ROW_BYTES, ahead = t->prefetch_bytes;
    int64_t block_bytes = group_block_bytes(kind, group), g = 0, turn = t->steps - ahead / group_bytes;
    const uint8_t *rows[MAX_MR];
    point_to_blocks(t, rows, mr);
    begin_sums(t, acc, mr, np * VECTORS);
    ask_for_out(t, mr, np);
    for (int half = 0; half < 2; ++half) {
        int64_t end = half ? t->steps : turn;
        for (; g < end; ++g) {
            group_place at = {kind, group, t->values + g * group_bytes, rows, block_bytes - 12,
                              g * PW_PANEL * t->scale_bytes};
            quant_group(t, acc, &at, mr, np, ahead);
            if (!ahead) ask_ahead_of_group(&t->next, rows, mr, np, g);
            advance_blocks(rows, mr, block_bytes);
            if (mr * np * VECTORS > QUANT_TILE_HELD) __asm__ volatile("" : "+m"(acc));
        }
        ahead += t->prefetch_jump;
    }
    end_sums(t, acc, mr, np * VECTORS);
}

/* Group 0: partial + D of these steps. Each part of k adds up in int32, y = (a s) D: D is exact, and rounds when it
 * becomes a float32, as do a s and the product: |y - exact| <= gamma_(2 + parts) sum over parts |a s D|. */
PW_INLINE void column_sums(const tile_call *t, int_sums dot, int mr, int np) {
    begin_columns(t, dot, mr, np);
    const uint8_t *rows[MAX_MR];
    point_to_blocks(t, rows, mr);
    ask_for_out(t, mr, np);
    for (int64_t g = 0; g < t->steps; ++g, advance_blocks(rows, mr, PW_K_MULTIPLE * Q8_ACTIVATION_BYTES)) {
        group_place at = {.kind = PW_Q8, .group = PW_K_MULTIPLE, .rows = rows};
        at.values = t->values + g * (PW_K_MULTIPLE * PW_PANEL);
        PW_UNROLL for (int i = 0; i < PW_K_MULTIPLE / 4; ++i) quant_step(t, dot, &at, mr, np, i);
        ask_ahead_of_group(&t->next, rows, mr, np, g);
    }
}

PW_INLINE void column_tile(const tile_call *t, int mr, int np) {
    int_sums dot;
    column_sums(t, dot, mr, np);
    end_columns(t, dot, mr, np);
}

PW_TILES(q8, QUANT_TILES, quant_tile, PW_Q8, 32)
PW_TILES(q8g16, QUANT_TILES, quant_tile, PW_Q8, 16)
PW_TILES(q4, QUANT_TILES, quant_tile, PW_Q4, 32)
PW_TILES(q8c, COLUMN_TILES, column_tile)
