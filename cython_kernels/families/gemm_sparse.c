/* families/gemm_sparse.c: micro-kernels that expand the panels of sparse weights as they read them; compiled once per ISA.
 *
 * The next vector row of each panel goes from the stream into a register and from there into the dots or multiply-adds of
 * every row of the tile: nothing passes through L1, and while a core multiplies, lines further on are on their way. What is
 * added, and in which order, is what the dense tile adds (gemm_dense.h, gemm_quant.c): the same bits, and the same bounds.
 * Only for cores whose instruction expands a vector row (pw_cpu_expands). Tiles of the tile unit: gemm_amx.c. */
#include "families/gemm_dense.h"
#include "families/gemm_expand.h"
#include "families/gemm_quant.h"

#ifdef PW_EXPAND_WORDS

PW_INLINE void sparse_dense_tile(const tile_call *t, dense_step kind, int mr, int np) {
    enum { SLOT_ROWS = PW_SLOT_INPUTS / 2 };
    tile_sums acc;
    sparse_reader in;
    vi w[MAX_TILE_PANELS];
    row_pointers x = point_to_rows(t, mr);
    int64_t end = t->first_row + t->steps;
    begin_reading(t, &in, PW_BF16, np);
    begin_sums(t, acc, mr, np);
    for (int64_t at = t->first_row, stop; at < end; at = stop) {
        int64_t slot = at / SLOT_ROWS, before = slot * SLOT_ROWS;
        stop = before + SLOT_ROWS < end ? before + SLOT_ROWS : end;
        read_slot(&in, PW_BF16, np, slot, at - before);
        for (int64_t row = at - before; row < stop - before; ++row) {
            read_vector_rows(&in, PW_BF16, np, row, w);
            dense_rows(kind, w, &x, 0, acc, mr, np);
            advance_rows(&x, mr, kind == STEP_BF16_FMA ? 8 : 4);
        }
    }
    end_sums(t, acc, mr, np);
}

enum { SPARSE_Q8_ROWS = PW_SLOT_INPUTS / 4 };

/* The vector rows of a group, from the panel's vector row `first` on; it ends in the slot where it begins. */
PW_INLINE void sparse_group(const tile_call *t, sparse_reader *in, int_sums dot, const group_place *at, int64_t first,
                            int mr, int np) {
    vi w[MAX_TILE_PANELS];
    int64_t row = first % SPARSE_Q8_ROWS;
    if (row == 0 || first == t->first_row) read_slot(in, PW_Q8, np, first / SPARSE_Q8_ROWS, row);
    PW_UNROLL for (int i = 0; i < at->group / 4; ++i) {
        read_vector_rows(in, PW_Q8, np, row + i, w);
        quant_rows(dot, w, at, mr, np, i);
    }
}

PW_INLINE void sparse_quant_tile(const tile_call *t, int group, int mr, int np) {
    tile_sums acc;
    sparse_reader in;
    int64_t block_bytes = group_block_bytes(PW_Q8, group);
    const uint8_t *rows[MAX_MR];
    begin_reading(t, &in, PW_Q8, np);
    point_to_blocks(t, rows, mr);
    begin_sums(t, acc, mr, np);
    ask_for_out(t, mr, np);
    for (int64_t g = 0; g < t->steps; ++g, advance_blocks(rows, mr, block_bytes)) {
        group_place at = {.kind = PW_Q8, .group = group, .rows = rows, .fields_at = block_bytes - 12,
                          .scales_at = g * PW_PANEL * t->scale_bytes};
        int_sums dot;
        begin_dots(dot, &at, mr, np);
        sparse_group(t, &in, dot, &at, t->first_row + g * (group / 4), mr, np);
        scale_group(t, acc, dot, &at, mr, np);
        if (mr * np > QUANT_TILE_HELD) __asm__ volatile("" : "+m"(acc));
    }
    end_sums(t, acc, mr, np);
}

PW_INLINE void sparse_column_tile(const tile_call *t, int mr, int np) {
    int_sums dot;
    sparse_reader in;
    const uint8_t *rows[MAX_MR];
    begin_reading(t, &in, PW_Q8, np);
    begin_columns(t, dot, mr, np);
    point_to_blocks(t, rows, mr);
    ask_for_out(t, mr, np);
    for (int64_t g = 0; g < t->steps; ++g, advance_blocks(rows, mr, PW_K_MULTIPLE * Q8_ACTIVATION_BYTES)) {
        group_place at = {.kind = PW_Q8, .group = PW_K_MULTIPLE, .rows = rows};
        sparse_group(t, &in, dot, &at, t->first_row + g * (PW_K_MULTIPLE / 4), mr, np);
    }
    end_columns(t, dot, mr, np);
}

#define SPARSE_DENSE_TILES(X, of...) \
    PW_ROWS_16(X, 1, of) PW_ROWS_14(X, 2, of) PW_ROWS_6(X, 4, of)
#define SPARSE_QUANT_TILES(X, of...) \
    PW_ROWS_16(X, 1, of) PW_ROWS_4(X, 2, of) PW_ROWS_2(X, 4, of)

PW_TILES(sparse_bf16_fma, SPARSE_DENSE_TILES, sparse_dense_tile, STEP_BF16_FMA)
#ifdef PW_BF16_DOT_WORDS
PW_TILES(sparse_bf16_dot, SPARSE_DENSE_TILES, sparse_dense_tile, STEP_BF16_DOT)
#endif
PW_TILES(sparse_q8, SPARSE_QUANT_TILES, sparse_quant_tile, 32)
PW_TILES(sparse_q8g16, SPARSE_QUANT_TILES, sparse_quant_tile, 16)
PW_TILES(sparse_q8c, SPARSE_QUANT_TILES, sparse_column_tile)

#endif
