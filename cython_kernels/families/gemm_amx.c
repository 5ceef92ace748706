/* families/gemm_amx.c: micro-kernels on the tile unit.
 *
 * bf16: every M goes through tdpbf16ps, 32 inputs at a time. It adds even and odd products in two float32 chains, and
 * their sum to y, with subnormals taken as zero: at most 16 + 1 + k/32 additions follow any product, so the bound of
 * gemm_dense.h holds with room, and a row's result does not depend on the rows beside it.
 *
 * q8 with a scale a column (group 0): tdpbsud, signed activations times unsigned weights, 64 inputs at a time, exact in
 * int32. The float step is that of gemm_quant.c, so the bits are those of the vector kernels. Blocks whose sub-scales apply
 * in integers are in gemm_blockwise.c.
 *
 * q8 and q4 with groups stay with the AVX-512 tiles. A group of 32 is one tile product, but its dots leave the tile unit
 * by memory to meet their scales, and neither products nor tile stores overlap 512-bit arithmetic: 62 cycles for
 * 16 x 16 x 32 at best, 94 for the AVX-512 tile, and no difference over whole matrices (measured on a Xeon 6, one core). */
#ifdef PW_AMX
#include "families/gemm_expand.h"
#include "families/gemm_quant.h"

__thread int pw_tile_shape;

enum { TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES, COLUMN_STEP_BYTES = PW_K_MULTIPLE * PW_PANEL };

/* What fills tiles 4, 5 and 6, 7: activations of up to 32 rows, one or two panels. */
typedef struct {
    const uint8_t *rows;
    int64_t row_bytes;
    const uint8_t *panels;
    int64_t panel_bytes;
    int far; /* ask_for */
} tile_operands;

/* What a step asks for ahead, beside its own panels. */
typedef struct {
    const uint8_t *values, *rows; /* of the next strip; of the next pass */
    int64_t values_step, panel_bytes, row_bytes;
    const float *out; /* the lines that the sums go to, a row a step */
    int64_t out_stride;
    int out_rows;
} tile_requests;

#define TILE_DOT(kind, c, a, b)                    \
    do {                                           \
        if ((kind) == PW_BF16) TILE_DOT_BF16(c, a, b); \
        else TILE_DOT_INT8(c, a, b);               \
    } while (0)

PW_INLINE void prefetch_tile(const uint8_t *p, int far) {
    PW_UNROLL for (int i = 0; i < TILE_ROWS; ++i) ask_for(p + i * TILE_ROW_BYTES, far);
}

/* Tiles 0 to 3 += rows times panels, over as many inputs as a tile holds. A pass reads each row once for a strip of panels,
 * and the strip once for each tile of rows: so the strip stays in L1, which the rows only pass through. */
PW_INLINE void tile_step(int kind, const tile_operands *o, int64_t ahead, int lower, int np) {
    TILE_LOAD(6, o->panels, TILE_ROW_BYTES);
    TILE_LOAD_ONCE(4, o->rows, o->row_bytes);
    TILE_DOT(kind, 0, 4, 6);
    if (ahead) prefetch_tile(o->panels + ahead, o->far);
    if (np == 2) {
        TILE_LOAD(7, o->panels + o->panel_bytes, TILE_ROW_BYTES);
        TILE_DOT(kind, 1, 4, 7);
        if (ahead) prefetch_tile(o->panels + o->panel_bytes + ahead, o->far);
    }
    if (lower) {
        TILE_LOAD_ONCE(5, o->rows + TILE_ROWS * o->row_bytes, o->row_bytes);
        TILE_DOT(kind, 2, 5, 6);
        if (np == 2) TILE_DOT(kind, 3, 5, 7);
    }
}

/* The last 32 inputs of q8, half a tile, beside zeros. */
PW_INLINE void half_step(const tile_call *t, const tile_operands *o, int lower, int np) {
    uint8_t rows[MAX_MR * TILE_ROW_BYTES] = {0}, panels[2 * TILE_BYTES] = {0};
    for (int r = 0; r < t->mr; ++r) memcpy(rows + r * TILE_ROW_BYTES, o->rows + r * o->row_bytes, PW_K_MULTIPLE);
    for (int p = 0; p < np; ++p) memcpy(panels + p * TILE_BYTES, o->panels + p * o->panel_bytes, COLUMN_STEP_BYTES);
    tile_operands padded = {rows, TILE_ROW_BYTES, panels, TILE_BYTES, 0};
    tile_step(PW_Q8, &padded, 0, lower, np);
}

PW_INLINE tile_requests requests_of(const tile_call *t, int kind) {
    const lookahead *next = &t->next;
    int steps_in_tile = kind == PW_Q8 ? 2 : 1;
    return (tile_requests){next->values, next->rows_ahead ? t->rows + next->rows_ahead : NULL,
                           steps_in_tile * next->values_step, next->panel_bytes, t->row_bytes, t->out, t->out_stride, t->mr};
}

/* A few lines a step: asked for at once they would take all the places of L1 for lines that are awaited. */
PW_INLINE void ask_beside(tile_requests *r, int np) {
    for (int64_t at = 0; at < r->values_step; at += VECTOR_ROW_BYTES) {
        PW_UNROLL for (int p = 0; p < np; ++p) ask_for(r->values + p * r->panel_bytes + at, 1);
    }
    r->values += r->values_step;
    if (r->rows) {
        ask_for(r->rows, 1);
        ask_for(r->rows + r->row_bytes, 1);
        r->rows += TILE_ROW_BYTES;
    }
    for (int i = 0; i < 2 && r->out_rows; ++i, --r->out_rows, r->out += r->out_stride) {
        PW_UNROLL for (int p = 0; p < np; ++p) __builtin_prefetch(r->out + p * PW_PANEL, 1);
    }
}

PW_INLINE void tile_steps(const tile_call *t, int kind, int lower, int np) {
    tile_operands o = {t->rows, t->row_bytes, t->values, t->panel_bytes, t->next.far};
    int64_t whole = kind == PW_Q8 ? t->steps / 2 : t->steps, ahead = t->prefetch_bytes, turn = whole - ahead / TILE_BYTES;
    tile_requests requests = requests_of(t, kind);
    for (int64_t step = 0; step < whole; ++step, o.rows += TILE_ROW_BYTES, o.panels += TILE_BYTES) {
        if (step == turn) ahead += t->prefetch_jump;
        tile_step(kind, &o, ahead, lower, np);
        if (!ahead) ask_beside(&requests, np);
    }
    if (kind == PW_Q8 && t->steps % 2) half_step(t, &o, lower, np);
}

#ifdef PW_EXPAND_WORDS
/* A tile of each panel, which is expanded while the tile unit multiplies the one before it. */
typedef struct {
    sparse_reader in;
    int64_t row; /* vector row of the panels that is read next */
    int is_begun;
    uint8_t tiles[2][2][TILE_BYTES] __attribute__((aligned(64))); /* [turn][panel] */
} expanding;

/* `count` vector rows of each panel, to the tiles of this turn. A part of k may begin in the middle of a slot. */
PW_INLINE void expand_next(expanding *e, int kind, int turn, int count, int np) {
    enum { TOGETHER = PW_K_MULTIPLE / 4 };
    int64_t slot_rows = PW_SLOT_INPUTS / pw_inputs_of_row(kind);
    vi w[MAX_TILE_PANELS];
    for (int done = 0; done < count; done += TOGETHER, e->row += TOGETHER) {
        int64_t row = e->row % slot_rows;
        if (row == 0 || !e->is_begun) read_slot(&e->in, kind, np, e->row / slot_rows, row);
        e->is_begun = 1;
        PW_UNROLL for (int i = 0; i < TOGETHER; ++i) {
            read_vector_rows(&e->in, kind, np, row + i, w);
            PW_UNROLL for (int p = 0; p < np; ++p) vi_store(e->tiles[turn][p] + (done + i) * VECTOR_ROW_BYTES, w[p]);
        }
    }
}

PW_INLINE void sparse_tile_steps(const tile_call *t, int kind, int lower, int np) {
    expanding e = {.row = t->first_row};
    int64_t whole = kind == PW_Q8 ? t->steps / 2 : t->steps;
    tile_operands o = {.rows = t->rows, .row_bytes = t->row_bytes, .panel_bytes = TILE_BYTES};
    begin_reading(t, &e.in, kind, np);
    if (whole) expand_next(&e, kind, 0, TILE_ROWS, np);
    for (int64_t step = 0; step < whole; ++step, o.rows += TILE_ROW_BYTES) {
        if (step + 1 < whole) expand_next(&e, kind, (int)((step + 1) % 2), TILE_ROWS, np);
        o.panels = e.tiles[step % 2][0];
        tile_step(kind, &o, 0, lower, np);
    }
    if (kind == PW_BF16 || t->steps % 2 == 0) return;
    expand_next(&e, kind, 0, TILE_ROWS / 2, np);
    o.panels = e.tiles[0][0];
    half_step(t, &o, lower, np);
}
#endif

/* Sums go in and out as they are, float32 or int32. */
PW_INLINE void tiles_from_partial(const tile_call *t, int lower, int np) {
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

PW_INLINE void store_tiles(float *out, int64_t stride, int lower, int np) {
    TILE_STORE(0, out, 4 * stride);
    if (np == 2) TILE_STORE(1, out + PW_PANEL, 4 * stride);
    if (!lower) return;
    TILE_STORE(2, out + TILE_ROWS * stride, 4 * stride);
    if (np == 2) TILE_STORE(3, out + TILE_ROWS * stride + PW_PANEL, 4 * stride);
}

PW_INLINE void finish_bf16(const tile_call *t, int lower, int np) {
    if (!t->add) {
        store_tiles(t->out, t->out_stride, lower, np);
        return;
    }
    float sums[MAX_MR * 2 * PW_PANEL] __attribute__((aligned(64)));
    store_tiles(sums, np * PW_PANEL, lower, np);
    for (int r = 0; r < t->mr; ++r) {
        for (int c = 0; c < np * PW_PANEL; c += LANES) {
            float *out = t->out + r * t->out_stride + c;
            v_store(out, v_add(v_load(out), v_load(sums + r * np * PW_PANEL + c)));
        }
    }
}

/* Row by row, because their number is no constant. */
PW_INLINE void finish_column(const tile_call *t, int lower, int np) {
    int_sums dot;
    store_tiles((float *)(void *)dot, MAX_TILE_PANELS * PW_PANEL, lower, np);
    for (int r = 0; r < t->mr; ++r) {
        tile_call row = *t;
        row.out += r * t->out_stride;
        row.row_scales += r * t->row_bytes;
        vi bias = column_bias(t, r);
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) dot[r][c] = vi_add(dot[r][c], bias);
        if (t->ends_part) scale_columns(&row, dot + r, 1, np * VECTORS);
        else store_column_sums(&row, dot + r, 1, np * VECTORS);
    }
}

PW_INLINE void amx_tile_sized(const tile_call *t, int kind, int sparse, int lower, int np) {
    tiles_from_partial(t, lower, np);
#ifdef PW_EXPAND_WORDS
    if (sparse) sparse_tile_steps(t, kind, lower, np);
    else
#endif
        tile_steps(t, kind, lower, np);
    (void)sparse;
    if (kind == PW_BF16) finish_bf16(t, lower, np);
    else finish_column(t, lower, np);
}

/* Up to 32 rows x 2 panels. */
PW_INLINE void amx_tile(const tile_call *t, int kind, int sparse) {
    int lower = t->mr > TILE_ROWS;
    tiles_begin(lower ? TILE_ROWS : t->mr, lower ? t->mr - TILE_ROWS : 1);
    if (lower && t->panels == 2) amx_tile_sized(t, kind, sparse, 1, 2);
    else if (lower) amx_tile_sized(t, kind, sparse, 1, 1);
    else if (t->panels == 2) amx_tile_sized(t, kind, sparse, 0, 2);
    else amx_tile_sized(t, kind, sparse, 0, 1);
}

#define AMX_TILES(name, kind, sparse)                                         \
    static void name##_amx(const tile_call *t) { amx_tile(t, kind, sparse); } \
    const tile_table ISA(name##_amx_tiles) = {[1 ... 32] = {[1 ... 2] = name##_amx}};

AMX_TILES(bf16, PW_BF16, 0)
AMX_TILES(q8c, PW_Q8, 0)
#ifdef PW_EXPAND_WORDS
AMX_TILES(sparse_bf16, PW_BF16, 1)
AMX_TILES(sparse_q8c, PW_Q8, 1)
#endif
#endif
