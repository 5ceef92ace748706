/* families/gemm.c: walks a share of y = x W^T in blocks and calls micro-kernels; compiled once per ISA.
 *
 * Loops, outermost first: panel blocks and row blocks, in either order, parts of k, passes over a part (a pass's
 * rows stay in L2), tiles of panels (a tile's weights stay in L1 or close to it), tiles of rows. A tile that is not at
 * the last pass of a part keeps its float32 sums in `partial`, and at the end of a part adds them to `total`: storing
 * and loading a float32 is exact, so passes do not change results. Error bounds: gemm_dense.h, gemm_quant.c. Sums of P
 * parts round P - 1 times more, 2^-24 of the sum each: within the same bounds, since the chains are shorter by as much.
 * On the tile unit a long pass outgrows L1: it is cut again, for a few tiles of rows, whose sums stay there (run_held).
 *
 * A sparse weight is expanded by the tile itself (gemm_sparse.c) where one tile has all rows and an instruction expands;
 * otherwise a pass expands its panels first (gemm_expand.h): from there on they are dense.
 * Where many rows meet the same weights, a pass stages them (gemm_stage.c), once for all tiles of rows, to the same
 * bits. Meanwhile the kernels ask for what comes next (look_ahead). */
#include "families/gemm_blocks.h"
#include "families/gemm_expand.h"
#include "families/gemm_tiles.h"

enum { BLOCK_FLOATS = 1 << 17, STAGED_ROWS = 64, MOST_AHEAD_BYTES = 1 << 16, SPARSE_HELD_MR = 8 };
enum { HELD_TILES = 4 }; /* of rows: their sums are 16 KiB */

static const tile_table no_tiles;

static const tile_table *const tiles[ARITHMETICS] = {
    [F32] = &ISA(f32_tiles),
    [BF16_FMA] = &ISA(bf16_fma_tiles),
    [F16_WIDENED] = &ISA(f16_widened_tiles),
#ifdef PW_F16_WORDS
    [F16_FMA] = &ISA(f16_tiles),
    [BF16_AS_F16] = &ISA(bf16_as_f16_tiles),
#else
    [F16_FMA] = &no_tiles,
    [BF16_AS_F16] = &no_tiles,
#endif
#ifdef PW_BF16_DOT_WORDS
    [BF16_DOT] = &ISA(bf16_dot_tiles),
#else
    [BF16_DOT] = &no_tiles,
#endif
#ifdef PW_AMX
    [BF16_TILE] = &ISA(bf16_amx_tiles),
    [Q8_COLUMN_TILE] = &ISA(q8c_amx_tiles),
#else
    [BF16_TILE] = &no_tiles,
    [Q8_COLUMN_TILE] = &no_tiles,
#endif
    [Q8_GROUP32] = &ISA(q8_tiles),
    [Q8_GROUP16] = &ISA(q8g16_tiles),
    [Q8_COLUMN] = &ISA(q8c_tiles),
    [Q4] = &ISA(q4_tiles),
};

/* Of tiles that expand sparse panels as they read them; NULL where none do. */
static const tile_table *const sparse_tiles[ARITHMETICS] = {
#ifdef PW_EXPAND_WORDS
    [BF16_FMA] = &ISA(sparse_bf16_fma_tiles),
#ifdef PW_BF16_DOT_WORDS
    [BF16_DOT] = &ISA(sparse_bf16_dot_tiles),
#endif
    [Q8_GROUP32] = &ISA(sparse_q8_tiles),
    [Q8_GROUP16] = &ISA(sparse_q8g16_tiles),
    [Q8_COLUMN] = &ISA(sparse_q8c_tiles),
#ifdef PW_AMX
    [BF16_TILE] = &ISA(sparse_bf16_amx_tiles),
    [Q8_COLUMN_TILE] = &ISA(sparse_q8c_amx_tiles),
#endif
#endif
};

static const tile_table *tiles_of(arithmetic kernels, const pw_weight *w) {
    switch (kernels) {
    case IN_BLOCKS: return &ISA(block_tiles)[w->kind];
    case BLOCKWISE: return &ISA(blockwise_tiles)[w->kind];
    case STAGED_BLOCKWISE: return &ISA(staged_blockwise_tiles)[w->kind];
    case BLOCKWISE_TILE: return &ISA(blockwise_amx_tiles)[w->kind];
    default: return tiles[kernels];
    }
}

/* The fastest on most cores that have the instruction set; the same on all of them, so that bits do not depend on the
 * vendor. Where bf16 dots are slow (Cooper Lake), tuning finds `fma`. */
static int32_t default_bf16_path(void) {
#if defined(PW_AMX)
    return PW_BF16_TILE;
#elif defined(PW_F16_WORDS)
    return PW_F16_FMA;
#elif defined(PW_BF16_DOT_WORDS)
    return PW_BF16_DOT;
#else
    return PW_FMA;
#endif
}

static int has_dense_path(int32_t path) {
    return path == PW_FMA || (path == PW_BF16_DOT && (*tiles[BF16_DOT])[1][1]) ||
           (path == PW_BF16_TILE && (*tiles[BF16_TILE])[1][1]);
}

int32_t ISA(path_of)(int32_t kind, int32_t group, int32_t path) {
    if (kind == PW_F32 || kind == PW_F16 || kind == PW_FP8) return PW_FMA;
    if (kind == PW_BF16 && path == PW_F16_FMA && (*tiles[BF16_AS_F16])[1][1]) return path;
    if (has_dense_path(path)) return path;
    if (kind == PW_BF16) return default_bf16_path();
    if (path == PW_INT8_DOT) return path;
    if (pw_has_subs(kind) && (path == PW_INT8_BLOCK || ISA(blockwise_amx_tiles)[kind][1][1])) return PW_INT8_BLOCK;
    return kind == PW_Q8 && group == 0 && (*tiles[Q8_COLUMN_TILE])[1][1] ? PW_INT8_TILE : PW_INT8_DOT;
}

static arithmetic quant_arithmetic(const pw_weight *w) {
    int32_t path = ISA(path_of)(w->kind, w->group, w->path);
    if (path == PW_FMA) return QUANT_AS_F32;
    if (path == PW_BF16_DOT) return QUANT_AS_BF16_DOT;
    if (path == PW_BF16_TILE) return QUANT_AS_BF16_TILE;
    if (path == PW_INT8_TILE) return Q8_COLUMN_TILE;
    if (path == PW_INT8_BLOCK) return BLOCKWISE;
    if (pw_in_blocks(w->kind)) return IN_BLOCKS;
    if (w->kind == PW_Q4) return Q4;
    return w->group == 16 ? Q8_GROUP16 : w->group ? Q8_GROUP32 : Q8_COLUMN;
}

static arithmetic arithmetic_of(const pw_weight *w) {
    if (w->kind == PW_F32) return F32;
    if (w->kind == PW_F16) return F16_WIDENED;
    if (w->kind == PW_FP8) return IN_BLOCKS;
    if (w->kind >= PW_Q8) return quant_arithmetic(w);
    int32_t path = ISA(path_of)(PW_BF16, 0, w->path);
    if (path == PW_F16_FMA) return BF16_AS_F16;
    return path == PW_FMA ? BF16_FMA : path == PW_BF16_DOT ? BF16_DOT : BF16_TILE;
}

/* Blocks whose sub-scales apply in integers have tiles of the unit for more rows than AVX-512 has tiles for: the same bits, so
 * that a schedule chooses by its number of rows. */
static arithmetic in_tile_of(arithmetic a, const pw_weight *w, int64_t mr) {
    return a == BLOCKWISE && mr > BLOCKWISE_MR && (*tiles_of(BLOCKWISE_TILE, w))[1][1] ? BLOCKWISE_TILE : a;
}

/* Whose micro-kernels read the weights once they are staged; all others read them as they are. */
static arithmetic staged_as(arithmetic a, const pw_weight *w) {
    if (w->kind == PW_FP8) return F32;
    if (a == IN_BLOCKS) a = pw_arithmetic_kind(w->kind) == PW_Q4 ? Q4 : w->group == 16 ? Q8_GROUP16 : Q8_GROUP32;
    switch (a) {
    case QUANT_AS_BF16_DOT: return BF16_DOT;
    case QUANT_AS_BF16_TILE: return BF16_TILE;
    case QUANT_AS_F32:
    case F16_WIDENED:
    case BF16_FMA: return F32;
    case BF16_AS_F16: return F16_FMA;
    case Q4: return stages_nibbles() ? Q8_GROUP32 : Q4;
    case BLOCKWISE: return STAGED_BLOCKWISE;
    default: return a;
    }
}

/* A product, and its schedule clamped to what exists. */
typedef struct {
    const pw_weight *w;
    const pw_activations *x;
    float *y;
    int64_t ldy;
    pw_epilogue epilogue;
    int mr, panels; /* the largest tile in use */
    int64_t block_rows, block_panels, block_steps, steps;
    int64_t step_inputs, step_row_bytes, step_value_bytes, prefetch_bytes;
    int64_t panel_bytes, panel_scale_bytes; /* of a whole panel of the weight */
    int32_t first_part, end_part; /* what this call computes of w->k_parts */
    arithmetic arithmetic, kernels; /* of the weight, of what a pass reads of it */
    const tile_table *tiles;        /* of these kernels */
    int staged;                     /* several tiles of rows meet the same panels, which are unpacked once for them */
    int sparse;                     /* a pass expands its panels first (gemm_expand.h), */
    int expands_in_tile;            /* or its tiles do */
    int stores_sums;                /* of a whole block, from pass to pass or part to part */
    int64_t held_rows, held_steps;  /* run_held; 0: a strip's pass is not cut again */
} walk;

/* One pass over k, and where it lies in its part of k. */
typedef struct {
    pw_range steps;
    int64_t scales_at; /* bytes from a panel's first scale */
    int begins_part, ends_part, first_part, last_part;
} pass;

/* The largest existing tile with at most these rows and panels; 1 x 1 always exists. */
static tile_kernel *largest_tile(const tile_table *table, int *mr, int *np) {
    *mr = (int)clamp(*mr, 1, MAX_MR);
    *np = (int)clamp(*np, 1, MAX_TILE_PANELS);
    while (*np > 1 && !(*table)[1][*np]) --*np;
    while (!(*table)[*mr][*np]) --*mr;
    return (*table)[*mr][*np];
}

/* The columns of a tile that exist go from t->out to y, the padding stays behind. */
static void copy_out(const walk *k, const tile_call *t, int64_t row, pw_range panels) {
    int64_t column = panels.begin * PW_PANEL, columns = at_most(panels.end * PW_PANEL, k->w->n) - column;
    for (int r = 0; r < t->mr; ++r) {
        const float *from = t->out + r * t->out_stride;
        float *y = k->y + (row + r) * k->ldy + column;
        for (int64_t c = 0; c < columns; ++c) y[c] = k->epilogue == PW_ADD ? y[c] + from[c] : from[c];
    }
}

/* The last pass over the only part: straight into y, or by way of a buffer where n ends inside the tile. */
static void finish_tile(const walk *k, tile_kernel *kernel, tile_call *t, int64_t row, pw_range panels) {
    float edge[MAX_MR * MAX_TILE_PANELS * PW_PANEL];
    if (panels.end * PW_PANEL <= k->w->n) {
        t->out = k->y + row * k->ldy + panels.begin * PW_PANEL;
        t->out_stride = k->ldy;
        t->add = k->epilogue == PW_ADD;
        kernel(t);
        return;
    }
    t->out = edge;
    t->out_stride = (panels.end - panels.begin) * PW_PANEL;
    t->add = 0;
    kernel(t);
    copy_out(k, t, row, panels);
}

/* The end of one of several parts: to the total of the parts before it, which the last part passes on to y. */
static void finish_part(const walk *k, tile_kernel *kernel, tile_call *t, const pass *p, int64_t row, pw_range panels,
                        float *total) {
    t->out = total;
    t->out_stride = t->partial_stride;
    t->add = !p->first_part;
    kernel(t);
    if (p->last_part) copy_out(k, t, row, panels);
}

/* Part i of k in steps. */
static pw_range part_steps(const walk *k, int32_t i) {
    pw_range inputs = pw_k_part(k->w, i);
    return (pw_range){inputs.begin / k->step_inputs, i + 1 == k->w->k_parts ? k->steps : inputs.end / k->step_inputs};
}

/* The tiles of one strip of panels, which are called by the same description, strip after strip: clearing and copying
 * it would cost as much as a small tile. */
static void first_call(const walk *k, pw_range panels, const pass *p, tile_call *t) {
    const pw_weight *w = k->w;
    int64_t np = panels.end - panels.begin, begin = p->steps.begin;
    t->panels = (int32_t)np;
    t->steps = p->steps.end - begin;
    t->partial_stride = np * PW_PANEL;
    t->panel_bytes = k->panel_bytes;
    t->values = (const uint8_t *)w->values + panels.begin * k->panel_bytes + begin * k->step_value_bytes;
    t->prefetch_jump = np * t->panel_bytes - t->steps * k->step_value_bytes;
    t->prefetch_bytes = t->prefetch_jump ? at_most(k->prefetch_bytes, t->panel_bytes) : k->prefetch_bytes;
    if (!w->scales) return;
    int64_t scales_at = panels.begin * k->panel_scale_bytes + p->scales_at;
    t->scale_bytes = w->scale_bytes;
    t->panel_scale_bytes = k->panel_scale_bytes;
    t->offsets = NULL;
    t->scales = (const uint8_t *)w->scales + scales_at;
    t->mins = w->mins ? (const uint8_t *)w->mins + scales_at : NULL;
}

/* A tile of panels in one pass over a block of rows. */
typedef struct {
    const pass *pass;
    pw_range rows, panels, block; /* block: the rows that share out asking for what comes next */
    int64_t index, count;   /* this one of the pass's strips */
    int64_t bytes_a_row;    /* of a panel: what each of the rows asks for ahead */
    float *partial, *total; /* [row of the block][column of the tile] */
} strip;

/* Prefetches weights a given number of bytes ahead of their reading, and at a panel's end the first of the next panels. Tiles in groups
 * ask for these themselves. */
static lookahead stream(const walk *k, const tile_call *t) {
    int nothing = !t->prefetch_bytes || is_grouped(k->kernels);
    return (lookahead){t->values + t->prefetch_bytes, nothing ? 0 : k->step_value_bytes, t->panel_bytes, 0,
                       is_far(t->prefetch_bytes)};
}

/* The tiles of rows of a strip share out asking for the weights of the next strip, and all tiles of a pass asking for
 * what the next pass reads of the rows: a row or two each. Quantised tiles ask for those of the next tile instead. */
static lookahead look_ahead(const walk *k, const lookahead *next_strip, const tile_call *t, const strip *s,
                            int64_t row) {
    int64_t rows = s->block.end - s->block.begin, done = row - s->block.begin;
    int64_t steps = s->pass->steps.end - s->pass->steps.begin;
    lookahead next = {.values = next_strip->values + done * s->bytes_a_row, .panel_bytes = next_strip->panel_bytes,
                      .far = is_far(k->prefetch_bytes)};
    next.values_step = pieces(t->mr * s->bytes_a_row, t->steps);
    if (k->held_rows || (s->pass->ends_part && s->pass->last_part)) return next;
    int64_t asked = s->index * rows / s->count + done / s->count; /* of the pass's rows, before this tile */
    next.rows_ahead = (asked - done) * t->row_bytes + steps * k->step_row_bytes;
    return next;
}

static void run_tile(const walk *k, tile_kernel *kernel, tile_call *t, const strip *s, int64_t row) {
    const pass *p = s->pass;
    int64_t so_far = (row - s->rows.begin) * t->partial_stride;
    t->partial = p->begins_part ? NULL : s->partial + so_far;
    if (p->ends_part && p->first_part && p->last_part) {
        finish_tile(k, kernel, t, row, s->panels);
    } else if (p->ends_part) {
        finish_part(k, kernel, t, p, row, s->panels, s->total + so_far);
    } else {
        t->out = s->partial + so_far;
        t->out_stride = t->partial_stride;
        t->add = 0;
        kernel(t);
    }
}

/* The tiles of a strip whose first call is ready. */
static void run_tiles(const walk *k, const strip *s, tile_call *t) {
    uint8_t bytes[STAGED_BYTES] __attribute__((aligned(64)));
    const lookahead next_strip = {.values = t->values + t->panels * t->panel_bytes, .panel_bytes = t->panel_bytes};
    int several = s->block.end - s->block.begin > k->mr && t->steps > 0 && k->prefetch_bytes;
    int dense = k->kernels <= BF16_DOT, in_tiles = k->kernels == BF16_TILE || k->kernels == Q8_COLUMN_TILE;
    int unpacked = k->staged && pw_in_blocks(k->w->kind);
    int asked = several && (dense || in_tiles || unpacked) && s->index > 0; /* by the last strip */
    if (asked) t->prefetch_bytes = t->prefetch_jump = 0;
    if (k->staged) ISA(stage)(k->arithmetic, t, k->w, bytes);
    const uint8_t *rows = k->x->rows, *block = rows + s->pass->steps.begin * k->step_row_bytes;
    int whole = dense && k->mr * k->panels * VECTORS > DENSE_HELD; /* tiles, and what they leave beside them */
    for (int64_t row = s->rows.begin; row < s->rows.end; row += t->mr) {
        int64_t left = s->rows.end - row;
        t->mr = (int)(whole ? at_most(left, k->mr) : fair_part(left, k->mr));
        tile_kernel *kernel = largest_tile(k->tiles, &t->mr, &t->panels);
        t->rows = block + row * t->row_bytes;
        t->row_scales = rows + row * t->row_bytes + row_values_bytes(k->arithmetic, k->w->k);
        t->row_biases = t->row_scales + COLUMN_SCALE_BYTES + 4 * s->pass->steps.begin;
        t->next = several && !t->prefetch_bytes ? look_ahead(k, &next_strip, t, s, row) : stream(k, t);
        if (!dense && !in_tiles) t->next.rows_ahead = t->mr * t->row_bytes;
        run_tile(k, kernel, t, s, row);
        t->prefetch_bytes = t->prefetch_jump = 0; /* the other rows find the weights in L1 */
    }
}

/* Expands what a pass reads of the panels: the call then reads that. */
static void expand(const walk *k, const strip *s, tile_call *t, uint8_t *bytes) {
    int64_t rows = t->steps * k->step_value_bytes / VECTOR_ROW_BYTES, np = t->panels;
    int64_t first = s->pass->steps.begin * k->step_value_bytes / VECTOR_ROW_BYTES;
    t->panel_bytes = rows * VECTOR_ROW_BYTES;
    t->prefetch_bytes = t->prefetch_jump = 0;
    t->values = bytes;
    for (int64_t p = 0; p < np; ++p) {
        sparse_panel panel = sparse_panel_of(k->w, s->panels.begin + p, np, k->prefetch_bytes);
        expand_rows(&panel, first, rows, bytes + p * t->panel_bytes);
    }
}

static void run_strip(const walk *k, const strip *s, tile_call *t) {
    uint8_t expanded[EXPANDED_BYTES] __attribute__((aligned(64)));
    first_call(k, s->panels, s->pass, t);
    if (k->held_rows && !s->pass->ends_part) t->prefetch_jump = 0; /* what follows in the panels is read next */
    if (k->expands_in_tile) {
        t->sparse = k->w;
        t->first_panel = s->panels.begin;
        t->first_row = s->pass->steps.begin * k->step_value_bytes / VECTOR_ROW_BYTES;
    }
    if (k->sparse) expand(k, s, t, expanded);
    run_tiles(k, s, t);
}

static int64_t bytes_a_row(const walk *k, const pass *p, pw_range rows) {
    return pieces((p->steps.end - p->steps.begin) * k->step_value_bytes, rows.end - rows.begin);
}

/* A strip's pass cut again, for some rows at a time. */
static void run_held(const walk *k, const strip *whole, tile_call *t) {
    const pass *p = whole->pass;
    int64_t most = fair_part(p->steps.end - p->steps.begin, k->held_steps);
    int64_t columns = (whole->panels.end - whole->panels.begin) * PW_PANEL;
    pass part = *p;
    strip s = *whole;
    s.pass = &part;
    for (s.rows.end = whole->rows.begin; s.rows.end < whole->rows.end;) {
        s.rows = (pw_range){s.rows.end, at_most(s.rows.end + k->held_rows, whole->rows.end)};
        int64_t at = k->stores_sums ? (s.rows.begin - whole->rows.begin) * columns : 0;
        s.partial = whole->partial + at;
        s.total = whole->total + at;
        part.steps.end = p->steps.begin;
        do {
            part.begins_part = p->begins_part && part.steps.end == p->steps.begin;
            part.steps = (pw_range){part.steps.end, at_most(part.steps.end + most, p->steps.end)};
            part.ends_part = p->ends_part && part.steps.end == p->steps.end;
            s.bytes_a_row = bytes_a_row(k, &part, s.block);
            run_strip(k, &s, t);
        } while (part.steps.end < p->steps.end);
    }
}

/* One pass over a block, whose sums lie tile of panels by tile of panels. */
static void block_pass(const walk *k, const pass *p, pw_range rows, pw_range panels, float *partial, float *total) {
    tile_call t = {.row_bytes = k->x->row_bytes, .ends_part = p->ends_part, .top_exponent = k->w->top_exponent};
    strip s = {.pass = p, .rows = rows, .block = rows, .count = pieces(panels.end - panels.begin, k->panels)};
    if (!k->sparse && !k->expands_in_tile) s.bytes_a_row = bytes_a_row(k, p, rows);
    for (int64_t panel = panels.begin; panel < panels.end; panel = s.panels.end, ++s.index) {
        int mr = 1, np = (int)at_most(k->panels, panels.end - panel);
        largest_tile(k->tiles, &mr, &np);
        int64_t at = k->stores_sums ? (rows.end - rows.begin) * (panel - panels.begin) * PW_PANEL : 0;
        s.panels = (pw_range){panel, panel + np};
        s.partial = partial + at;
        s.total = total + at;
        if (k->held_rows) run_held(k, &s, &t);
        else run_strip(k, &s, &t);
    }
}

/* A block of rows times a block of panels, all that the call computes of k. An empty part is zero. */
static void block(const walk *k, pw_range rows, pw_range panels) {
    float partial[BLOCK_FLOATS] __attribute__((aligned(64))), total[BLOCK_FLOATS] __attribute__((aligned(64)));
    for (int32_t i = k->first_part; i < k->end_part; ++i) {
        pw_range part = part_steps(k, i);
        pass p = {.steps = {part.begin, part.begin}, .first_part = i == k->first_part, .last_part = i + 1 == k->end_part};
        do {
            p.begins_part = p.steps.end == part.begin;
            p.steps = (pw_range){p.steps.end, at_most(p.steps.end + k->block_steps, part.end)};
            if (k->w->group && !pw_in_blocks(k->w->kind))
                p.scales_at = p.steps.begin * k->step_inputs / k->w->group * PW_PANEL * k->w->scale_bytes;
            p.ends_part = p.steps.end == part.end;
            block_pass(k, &p, rows, panels, partial, total);
        } while (!p.ends_part);
    }
}

/* Rows that meet blocks as they are. Some kinds gain less by being unpacked than others: nibbles, which a tile of many
 * columns reads at little cost, tables and sub-scales; none gains anything where unpacking is beside dots, and where such a
 * core has no byte dots any number of rows is faster so. */
static int64_t most_block_rows(const pw_weight *w) {
    if (w->kind == PW_FP8) return BLOCK_MR;
    if (LANES >= 8 && pw_core()->unpacks_beside_dots) return PW_DOT_OPERANDS ? 8 * BLOCK_MR : INT64_MAX;
    int looked_up = pw_block_format_of(w->kind).table != PW_NO_TABLE, nibbles = pw_arithmetic_kind(w->kind) == PW_Q4;
    int gains_less = LANES == 16 ? nibbles : LANES == 8 && (looked_up || pw_has_subs(w->kind));
    return BLOCK_ROWS + (gains_less ? BLOCK_MR : 0);
}

/* Whether unpacking the weights costs less, for this number of rows, than reading them packed. */
static int staging_pays(arithmetic a, const pw_weight *w, int64_t rows, int64_t mr) {
    if (a >= ARITHMETICS) return 1;
    if (a == BF16_FMA || a == F16_WIDENED) return rows >= STAGED_ROWS;
    if (a == BF16_AS_F16) return rows > 2 * mr; /* a second tile finds what the first has read in L1 */
    if (a == IN_BLOCKS) return rows > most_block_rows(w);
    if (a == BLOCKWISE) return rows > (LANES == 16 && !(*tiles_of(BLOCKWISE_TILE, w))[1][1] ? 3 : 1) * BLOCKWISE_MR;
    return is_grouped(a) && rows > (a == Q4 ? 3 : 2) * mr;
}

/* Panels for a few rows are expanded into L1, and one strip's at a time, so that each panel is one stream of memory. */
static void fit_expansion(walk *k, int64_t rows) {
    int streams = rows <= k->mr;
    int64_t most = (streams ? STREAMED_BYTES : EXPANDED_BYTES) / (k->panels * k->step_value_bytes);
    k->block_steps = clamp(most, 1, k->block_steps);
    if (k->arithmetic == Q8_COLUMN_TILE && k->block_steps > 1) k->block_steps &= ~INT64_C(1);
    if (streams) k->block_panels = k->panels;
}

/* The tiles that expand, where one of them has all rows: all of its panels that it can, so that none is expanded twice. Where a
 * dot takes four instructions, more sums than registers hold cost more than a second expansion, and so does a stage: rows are cut
 * into such tiles, whose rows meet a block of panels one after the other, in one pass. 1 where they are. */
static int expand_in_tiles(walk *k, int64_t rows) {
    const tile_table *table = k->arithmetic < ARITHMETICS ? sparse_tiles[k->arithmetic] : NULL;
    int wide_dots = is_grouped(k->arithmetic) && Q8_ACTIVATION_BYTES > 1;
    int64_t mr = wide_dots ? fair_part(rows, SPARSE_HELD_MR) : rows;
    if (!table || (k->staged && !wide_dots) || rows > MAX_MR || !(*table)[mr][1] || !pw_cpu_expands()) return 0;
    k->sparse = k->staged = 0;
    k->expands_in_tile = 1;
    k->kernels = k->arithmetic;
    k->tiles = table;
    k->mr = (int)mr;
    k->block_rows = at_most(k->block_rows, mr);
    while (!(*table)[mr][k->panels]) --k->panels;
    return mr < rows;
}

/* Dense bf16 alone: what is staged or expanded would be so anew for each few rows. */
static void hold_sums(walk *k, int64_t rows) {
    int64_t step_bytes = k->panels * k->step_value_bytes, sums = HELD_TILES * k->mr * k->panels * VECTOR_ROW_BYTES;
    if (rows <= k->mr || k->block_steps * step_bytes <= PW_TILE_L1_BYTES) return;
    k->held_rows = HELD_TILES * k->mr;
    k->held_steps = (PW_TILE_L1_BYTES - sums) / step_bytes;
}

static walk plan_walk(const pw_weight *w, const pw_schedule *s, int32_t part, int64_t rows) {
    walk k = {.w = w, .mr = s->mr, .panels = s->panels, .first_part = part, .end_part = part + 1, .sparse = !!w->offsets};
    if (part < 0) k.first_part = 0, k.end_part = w->k_parts;
    k.arithmetic = arithmetic_of(w);
    k.block_rows = clamp(s->block_m, 1, INT32_MAX);
    k.staged = staging_pays(k.arithmetic, w, at_most(k.block_rows, rows), clamp(s->mr, 1, MAX_MR));
    if (k.staged) k.arithmetic = in_tile_of(k.arithmetic, w, s->mr);
    k.kernels = k.staged ? staged_as(k.arithmetic, w) : k.arithmetic;
    k.tiles = tiles_of(k.kernels, w);
    int64_t staged_bytes = staged_step_bytes(k.arithmetic, w);
    if (k.staged) k.panels = (int)clamp(k.panels, 1, STAGED_BYTES / staged_bytes);
    largest_tile(k.tiles, &k.mr, &k.panels);
    int cut = k.sparse && expand_in_tiles(&k, at_most(k.block_rows, rows));
    k.step_inputs = inputs_of_step(k.arithmetic, w);
    k.steps = k.arithmetic == F32 || k.arithmetic == F16_WIDENED ? w->k : pw_padded_k(w->k) / k.step_inputs;
    k.step_row_bytes = row_bytes_of_step(k.arithmetic, w);
    k.panel_bytes = pw_panel_bytes(w);
    k.step_value_bytes = pw_in_blocks(w->kind) ? k.panel_bytes / k.steps
                                               : k.step_inputs * VECTOR_ROW_BYTES / pw_inputs_of_row(w->kind);
    int64_t scales = pw_in_blocks(w->kind) ? 2 : w->group ? pw_padded_k(w->k) / w->group : 1;
    k.panel_scale_bytes = scales * PW_PANEL * w->scale_bytes;
    k.block_steps = clamp(s->block_k / k.step_inputs, 1, k.steps);
    if (k.arithmetic == Q8_COLUMN_TILE && k.block_steps > 1) k.block_steps &= ~INT64_C(1); /* whole tiles */
    k.block_panels = clamp(s->block_n / PW_PANEL / k.panels, 1, INT32_MAX) * k.panels;
    int64_t fitting = STAGED_BYTES / (k.panels * staged_bytes);
    if (k.staged) k.block_steps = clamp(fitting, 1, k.block_steps);
    if (k.sparse) fit_expansion(&k, rows);
    if (cut) k.block_steps = k.steps;
    if (k.arithmetic == BF16_AS_F16 && k.block_steps < k.steps) k.block_steps = whole_folds(k.block_steps);
    k.stores_sums = k.block_steps < k.steps || w->k_parts > 1;
    if (k.stores_sums) {
        k.block_rows = at_most(k.block_rows, BLOCK_FLOATS / (k.panels * PW_PANEL));
        k.block_panels = at_most(k.block_panels, BLOCK_FLOATS / (k.block_rows * k.panels * PW_PANEL) * k.panels);
    }
    if (k.arithmetic == BF16_TILE && !k.sparse && !k.expands_in_tile) hold_sums(&k, at_most(k.block_rows, rows));
    k.prefetch_bytes = clamp(s->prefetch_bytes, 0, MOST_AHEAD_BYTES);
    return k;
}

/* Both loops over blocks, either way round. */
static void walk_blocks(const walk *k, pw_range rows, pw_range panels, int rows_outside) {
    pw_range outer = rows_outside ? rows : panels, inner = rows_outside ? panels : rows;
    int64_t outer_size = rows_outside ? k->block_rows : k->block_panels, inner_size = rows_outside ? k->block_panels : k->block_rows;
    for (int64_t i = outer.begin; i < outer.end; i += outer_size) {
        pw_range out = {i, at_most(i + outer_size, outer.end)};
        for (int64_t j = inner.begin; j < inner.end; j += inner_size) {
            pw_range in = {j, at_most(j + inner_size, inner.end)};
            block(k, rows_outside ? out : in, rows_outside ? in : out);
        }
    }
}

void ISA(gemm)(const pw_weight *w, const pw_activations *x, pw_range rows, pw_range panels, int32_t part, float *y,
               int64_t ldy, pw_epilogue epilogue, const pw_schedule *schedule) {
    walk k = plan_walk(w, schedule, part, rows.end - rows.begin);
    k.x = x;
    k.y = y;
    k.ldy = ldy;
    k.epilogue = epilogue;
    walk_blocks(&k, rows, panels, schedule->loop_order == PW_LOOP_MN);
#ifdef PW_AMX
    tiles_end();
#endif
}

typedef struct {
    int64_t rows;
    int32_t panels;
} tile_size;

/* A few more rows than a flat tile has fit a tall one, or two, so that fewer read the weights. Where there are many, it
 * depends on the core. */
static tile_size quant_size(arithmetic a, int64_t m) {
    int few = m <= QUANT_TALLEST_MR, tallest = few || (a == Q4 && m <= 2 * QUANT_TALLEST_MR);
    if (m <= QUANT_MR || !QUANT_TALL_MR) return (tile_size){QUANT_MR, QUANT_PANELS};
    if (tallest && pieces(m, QUANT_TALLEST_MR) < pieces(m, QUANT_TALL_MR)) return (tile_size){QUANT_TALLEST_MR, 1};
    if (few || (a == Q4 && m <= 2 * QUANT_TALL_MR) || !(PW_DOT_OPERANDS && pw_core()->flat_tiles))
        return (tile_size){QUANT_TALL_MR, QUANT_TALL_PANELS};
    return (tile_size){QUANT_MR, QUANT_PANELS};
}

/* The rows that whole tiles leave have too few sums in one panel: until a sum may be added to again, BUSY_SUMS can be. Two panels
 * keep a core busy, and the tiles before them take these one after the other. Where a panel is two vectors. */
static int leaves_few(int64_t m) {
    enum { BUSY_SUMS = 8 };
    int64_t left = m % DENSE_MR;
    return VECTORS == 2 && m < STAGED_ROWS && left > 0 && left * VECTORS < BUSY_SUMS;
}

/* bf16 weights become float16 once, while they arrive, where one tile has all the rows. */
static tile_size dense_size(arithmetic a, int64_t m) {
    int64_t tall = DENSE_TALL_MR;
    if (leaves_few(m)) return (tile_size){DENSE_MR - (m % DENSE_MR == 1), 2}; /* 5 + 2 rather than 6 + 1 */
    if (a == BF16_AS_F16 && m > tall && m <= F16_TALLEST_MR) return (tile_size){F16_TALLEST_MR, 1};
    if (tall && m <= 2 * tall && pieces(m, tall) < pieces(m, DENSE_MR)) return (tile_size){tall, DENSE_TALL_PANELS};
    return (tile_size){DENSE_MR, DENSE_PANELS};
}

static tile_size size_for(arithmetic a, int64_t m) {
    if (a == BF16_TILE || a == QUANT_AS_BF16_TILE || a == Q8_COLUMN_TILE) return (tile_size){32, 2};
    if (a == BLOCKWISE_TILE) return (tile_size){32, 1};
    if (a == STAGED_BLOCKWISE) return (tile_size){BLOCKWISE_MR, 1};
    tile_size size = {COLUMN_MR, COLUMN_PANELS};
    if (a != Q8_COLUMN) size = is_grouped(a) ? quant_size(a, m) : dense_size(a, m);
    if (m <= 2) size.panels = STREAM_PANELS;
    return size;
}

int32_t ISA(reads_blocks)(const pw_weight *w, int64_t m) { return arithmetic_of(w) == IN_BLOCKS && m <= most_block_rows(w); }

int32_t ISA(has_tile)(const pw_weight *w, int32_t mr, int32_t panels) {
    arithmetic a = in_tile_of(arithmetic_of(w), w, mr), kernels = a >= IN_BLOCKS ? staged_as(a, w) : a;
    return mr >= 1 && mr <= MAX_MR && panels >= 1 && panels <= MAX_TILE_PANELS && (*tiles_of(kernels, w))[mr][panels];
}

/* Few rows stream weights through as many panels at once as their tile has; more share out evenly among large tiles. */
void ISA(best_tile)(const pw_weight *w, int64_t m, int32_t *mr, int32_t *panels) {
    arithmetic a = in_tile_of(arithmetic_of(w), w, m);
    tile_size size = {w->kind == PW_NVFP4 ? at_most(6, BLOCK_MR) : BLOCK_MR, 1}; /* more rows and their scales spill */
    if (!ISA(reads_blocks)(w, m)) size = size_for(a == IN_BLOCKS || a == BLOCKWISE ? staged_as(a, w) : a, m);
    else if (w->kind == PW_FP8 && m <= (LANES == 16 ? 4 : 2)) size = (tile_size){2, 4};
    if (w->kind == PW_FP8 && m > BLOCK_MR) size.rows = at_most(size.rows, pieces(m, 2)); /* the first asks for the next strip */
    *panels = size.panels;
    int whole = size.panels > 1 && leaves_few(m); /* run_tiles */
    *mr = (int32_t)(m < 1 ? 1 : m <= 3 * size.rows && !whole ? pieces(m, pieces(m, size.rows)) : at_most(m, size.rows));
    while (*panels > 1 && !ISA(has_tile)(w, *mr, *panels)) --*panels;
}
