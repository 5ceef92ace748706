/* families/gemm_amx.c: micro-kernels on the tile unit.
 *
 * bf16: every M goes through tdpbf16ps, 32 inputs at a time. It adds even and odd products in two float32 chains, and
 * their sum to y, with subnormals taken as zero: at most 16 + 1 + k/32 additions follow any product, so the bound of
 * gemm_dense.c holds with room, and a row's result does not depend on the rows beside it.
 *
 * q8 and q4 stay with the AVX-512 tiles. A group of 32 is one tile product, but its dots leave the tile unit by memory
 * to meet their scales, and neither products nor tile stores overlap 512-bit arithmetic: 62 cycles for 16 x 16 x 32 at
 * best, 94 for the AVX-512 tile, and no difference over whole matrices (measured on a Xeon 6, one core). */
#include "families/gemm.h"

enum { BF16_STEP_BYTES = TILE_ROW_BYTES, BF16_STEP_VALUE_BYTES = TILE_ROWS * TILE_ROW_BYTES };

PW_INLINE void prefetch_lines(const uint8_t *p, int lines) {
    PW_UNROLL for (int i = 0; i < lines; ++i) __builtin_prefetch(p + i * VECTOR_ROW_BYTES);
}

PW_INLINE void bf16_tile_steps(const tile_call *t, int lower, int np) {
    int64_t panel_bytes = t->panel_bytes, row_bytes = t->row_bytes, ahead = t->prefetch_bytes;
    int64_t turn = t->steps - ahead / BF16_STEP_VALUE_BYTES;
    const uint8_t *a = t->rows, *b = t->values;
    for (int64_t step = 0; step < t->steps; ++step, a += BF16_STEP_BYTES, b += BF16_STEP_VALUE_BYTES) {
        if (step == turn) ahead += t->prefetch_jump;
        TILE_LOAD(6, b, TILE_ROW_BYTES);
        TILE_LOAD(4, a, row_bytes);
        TILE_DOT_BF16(0, 4, 6);
        if (ahead) prefetch_lines(b + ahead, TILE_ROWS);
        if (np == 2) {
            TILE_LOAD(7, b + panel_bytes, TILE_ROW_BYTES);
            TILE_DOT_BF16(1, 4, 7);
            if (ahead) prefetch_lines(b + panel_bytes + ahead, TILE_ROWS);
        }
        if (lower) {
            TILE_LOAD(5, a + TILE_ROWS * row_bytes, row_bytes);
            TILE_DOT_BF16(2, 5, 6);
            if (np == 2) TILE_DOT_BF16(3, 5, 7);
        }
    }
}

PW_INLINE void bf16_tile_begin(const tile_call *t, int lower, int np) {
    int64_t stride = 4 * t->partial_stride;
    const float *below = t->partial ? t->partial + TILE_ROWS * t->partial_stride : NULL;
    if (t->partial) TILE_LOAD(0, t->partial, stride);
    else TILE_ZERO(0);
    if (t->partial && np == 2) TILE_LOAD(1, t->partial + PW_PANEL, stride);
    else TILE_ZERO(1);
    if (t->partial && lower) TILE_LOAD(2, below, stride);
    else TILE_ZERO(2);
    if (t->partial && lower && np == 2) TILE_LOAD(3, below + PW_PANEL, stride);
    else TILE_ZERO(3);
}

PW_INLINE void bf16_tile_store(float *out, int64_t stride, int lower, int np) {
    TILE_STORE(0, out, 4 * stride);
    if (np == 2) TILE_STORE(1, out + PW_PANEL, 4 * stride);
    if (!lower) return;
    TILE_STORE(2, out + TILE_ROWS * stride, 4 * stride);
    if (np == 2) TILE_STORE(3, out + TILE_ROWS * stride + PW_PANEL, 4 * stride);
}

PW_INLINE void bf16_tile_sized(const tile_call *t, int lower, int np) {
    bf16_tile_begin(t, lower, np);
    bf16_tile_steps(t, lower, np);
    if (!t->add) {
        bf16_tile_store(t->out, t->out_stride, lower, np);
        return;
    }
    float sums[MAX_MR * 2 * PW_PANEL] __attribute__((aligned(64)));
    bf16_tile_store(sums, np * PW_PANEL, lower, np);
    for (int r = 0; r < t->mr; ++r) {
        for (int c = 0; c < np * PW_PANEL; c += LANES) {
            float *out = t->out + r * t->out_stride + c;
            v_store(out, v_add(v_load(out), v_load(sums + r * np * PW_PANEL + c)));
        }
    }
}

/* Up to 32 rows x 2 panels. */
static void amx_bf16(const tile_call *t) {
    int lower = t->mr > TILE_ROWS;
    tiles_begin(lower ? TILE_ROWS : t->mr, lower ? t->mr - TILE_ROWS : 1);
    if (lower && t->panels == 2) bf16_tile_sized(t, 1, 2);
    else if (lower) bf16_tile_sized(t, 1, 1);
    else if (t->panels == 2) bf16_tile_sized(t, 0, 2);
    else bf16_tile_sized(t, 0, 1);
}
