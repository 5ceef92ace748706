/* families/gemm_even_odd.c: bf16 in vectors by the arithmetic of the tile unit; compiled once per ISA.
 *
 * Bit for bit what gemm_amx.c adds, so that rows may meet either: for every 32 inputs a chain of multiply-adds from 0 over the
 * even ones and one over the odd ones, and their sum is added to y. Subnormals are zero, in and out, while it lasts: by the
 * mode of the thread, in calls that a compiler moves nothing into. The bound is that of gemm_amx.c. */
#include "families/gemm_dense.h"

#ifdef PW_FLUSH_WORDS

enum { EVEN_ODD_ROWS = PW_K_MULTIPLE / 2, EVEN_ODD_BYTES = EVEN_ODD_ROWS * VECTOR_ROW_BYTES };

/* 32 inputs of a row as float32: the even ones, the odd ones. */
typedef float widened_inputs[2][EVEN_ODD_ROWS] __attribute__((aligned(64)));

PW_INLINE void widen_row(const uint8_t *row, float (*to)[EVEN_ODD_ROWS]) {
    PW_UNROLL for (int i = 0; i < EVEN_ODD_ROWS; i += LANES) {
        vi pairs = vi_load(row + 4 * i);
        v_store(to[0] + i, vi_as_vf(vi_shl(pairs, 16)));
        v_store(to[1] + i, vi_as_vf(vi_and(pairs, vi_set1((int32_t)0xFFFF0000))));
    }
}

/* Vector row `i` of each panel times the pair of each row. */
PW_INLINE void add_pairs(const uint8_t *values, int64_t panel_bytes, widened_inputs *x, int i, vf *even, vf *odd, int mr, int np) {
    PW_UNROLL for (int p = 0; p < np; ++p) {
        vi pairs = vi_load(values + p * panel_bytes + i * VECTOR_ROW_BYTES);
        vf first = vi_as_vf(vi_shl(pairs, 16)), second = vi_as_vf(vi_and(pairs, vi_set1((int32_t)0xFFFF0000)));
        PW_UNROLL for (int r = 0; r < mr; ++r) {
            even[r * np + p] = v_fma_in_place(v_set1(x[r][0][i]), first, even[r * np + p]);
            odd[r * np + p] = v_fma_in_place(v_set1(x[r][1][i]), second, odd[r * np + p]);
        }
    }
}

PW_INLINE void ask_for_pairs(const uint8_t *line, int64_t panel_bytes, int far, int np) {
    PW_UNROLL for (int p = 0; p < np; ++p) ask_for(line + p * panel_bytes, far);
}

PW_INLINE void even_odd_steps(const tile_call *t, vf *sums, int mr, int np) {
    widened_inputs x[MAX_MR];
    const uint8_t *values = t->values, *rows = t->rows;
    int64_t ahead = t->prefetch_bytes, turn = t->steps - ahead / EVEN_ODD_BYTES;
    for (int64_t step = 0; step < t->steps; ++step, values += EVEN_ODD_BYTES, rows += 2 * PW_K_MULTIPLE) {
        vf even[MAX_MR * MAX_TILE_PANELS], odd[MAX_MR * MAX_TILE_PANELS];
        if (step == turn) ahead += t->prefetch_jump;
        PW_UNROLL for (int r = 0; r < mr; ++r) widen_row(rows + r * t->row_bytes, x[r]);
        PW_UNROLL for (int i = 0; i < mr * np; ++i) even[i] = odd[i] = v_zero();
        for (int i = 0; i < EVEN_ODD_ROWS; ++i) {
            if (ahead) ask_for_pairs(values + ahead + i * VECTOR_ROW_BYTES, t->panel_bytes, t->next.far, np);
            add_pairs(values, t->panel_bytes, x, i, even, odd, mr, np);
        }
        PW_UNROLL for (int i = 0; i < mr * np; ++i) sums[i] = v_add(sums[i], v_add(even[i], odd[i]));
    }
}

typedef void even_odd_sums(const tile_call *t, vf *sums);

PW_INLINE void even_odd_tile(const tile_call *t, even_odd_sums *add, int mr, int np) {
    tile_sums sums;
    begin_sums(t, sums, mr, np);
    uint32_t mode = flush_begin();
    add(t, sums);
    flush_end(mode);
    end_sums(t, sums, mr, np);
}

#define EVEN_ODD_TILE(mr, np, name)                                                                     \
    static __attribute__((noinline)) void name##_sums_##mr##x##np(const tile_call *t, vf *sums) {       \
        even_odd_steps(t, sums, mr, np);                                                                \
    }                                                                                                   \
    static void name##_##mr##x##np(const tile_call *t) { even_odd_tile(t, name##_sums_##mr##x##np, mr, np); }

EVEN_ODD_TILES(EVEN_ODD_TILE, even_odd)
const tile_table ISA(even_odd_tiles) = {EVEN_ODD_TILES(PW_TILE_ENTRY, even_odd)};

#endif
