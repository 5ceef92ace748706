/* families/gemm.c: walks a share of y = x W^T in blocks and calls micro-kernels; compiled once per ISA.
 *
 * Loops, outermost first: panel blocks (stay in L2) and row blocks, in either order, tiles of panels, parts of k,
 * passes over a part (a tile's weights stay in L1), tiles of rows. A tile that is not at the last pass of a part keeps
 * its float32 sums in `partial`, and at the end of a part adds them to `total`: storing and loading a float32 is
 * exact, so passes do not change results. Error bounds: gemm_dense.c, gemm_quant.c. Sums of P parts round P - 1 times
 * more, 2^-24 of the sum each: within the same bounds, since the chains are shorter by as much. */
#include "families/gemm.h"

enum { PARTIAL_FLOATS = 16384 };
enum { Q8_GROUP16 = PW_KINDS, Q8_COLUMN, FORMS };

#ifdef PW_AMX
enum { BF16_STEP_PAIRS = 16 }; /* a tile takes 32 inputs at once */
#else
enum { BF16_STEP_PAIRS = 1 };
#endif

typedef tile_kernel *tile_table[MAX_MR + 1][MAX_TILE_PANELS + 1];

static const tile_table tiles[FORMS] = {
#define TILE(mr, np) [PW_F32][mr][np] = f32_##mr##x##np,
    DENSE_TILES(TILE)
#undef TILE
#define TILE(mr, np)                                                             \
    [PW_Q8][mr][np] = q8_##mr##x##np, [Q8_GROUP16][mr][np] = q8g16_##mr##x##np, \
    [PW_Q4][mr][np] = q4_##mr##x##np,
    QUANT_TILES(TILE)
#undef TILE
#define TILE(mr, np) [Q8_COLUMN][mr][np] = q8c_##mr##x##np,
    COLUMN_TILES(TILE)
#undef TILE
#ifdef PW_AMX
    [PW_BF16] = {[1 ... 32] = {[1 ... 2] = amx_bf16}},
#else
#define TILE(mr, np) [PW_BF16][mr][np] = bf16_##mr##x##np,
    DENSE_TILES(TILE)
#undef TILE
#endif
};

/* A product, and its schedule clamped to what exists. */
typedef struct {
    const pw_weight *w;
    const pw_activations *x;
    float *y;
    int64_t ldy;
    pw_epilogue epilogue;
    int mr, panels; /* the largest tile in use */
    int64_t block_m, block_n, block_steps, steps;
    int64_t step_inputs, step_row_bytes, step_value_bytes, prefetch_bytes;
    int32_t first_part, end_part; /* what this call computes of w->k_parts */
    int staged;                   /* several tiles of rows meet the same panels, which are unpacked once for them */
    const tile_table *tiles;
} walk;

/* One pass over k, and where it lies in its part of k. */
typedef struct {
    pw_range steps;
    int begins_part, ends_part, first_part, last_part;
} pass;

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

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

/* Of a panel, what this call reads. */
static int64_t call_bytes(const walk *k) {
    int64_t steps = part_steps(k, k->end_part - 1).end - part_steps(k, k->first_part).begin;
    return steps * k->step_value_bytes;
}

/* What all calls of one pass share, for one tile of panels. */
static tile_call first_call(const walk *k, pw_range panels, const pass *p) {
    const pw_weight *w = k->w;
    int64_t np = panels.end - panels.begin, begin = p->steps.begin;
    tile_call t = {.row_bytes = k->x->row_bytes, .steps = p->steps.end - begin, .partial_stride = np * PW_PANEL};
    t.panel_bytes = pw_padded_k(w->k) / inputs_per_vector_row(w->kind) * VECTOR_ROW_BYTES;
    t.values = (const uint8_t *)w->values + panels.begin * t.panel_bytes + begin * k->step_value_bytes;
    t.prefetch_bytes = at_most(k->prefetch_bytes, t.panel_bytes);
    if (p->last_part && p->ends_part) t.prefetch_jump = np * t.panel_bytes - call_bytes(k);
    if (!w->scales) return t;
    int64_t groups = w->group ? k->steps : 1, first_group = w->group ? begin : 0;
    int64_t scales_at = (panels.begin * groups + first_group) * PW_PANEL * w->scale_bytes;
    t.scale_bytes = w->scale_bytes;
    t.panel_scale_bytes = groups * PW_PANEL * w->scale_bytes;
    t.ends_part = p->ends_part;
    t.scales = (const uint8_t *)w->scales + scales_at;
    t.mins = w->mins ? (const uint8_t *)w->mins + scales_at : NULL;
    return t;
}

/* One pass over a block of rows; sums that another pass or part continues stay at [row of the block][column]. */
static void run_pass(const walk *k, const tile_table *table, tile_call *t, pw_range rows, pw_range panels,
                     const pass *p, float *partial, float *total) {
    const uint8_t *block = (const uint8_t *)k->x->rows + p->steps.begin * k->step_row_bytes;
    for (int64_t row = rows.begin; row < rows.end;) {
        int mr = (int)at_most(k->mr, rows.end - row), np = (int)(panels.end - panels.begin);
        tile_kernel *kernel = largest_tile(table, &mr, &np);
        int64_t so_far = (row - rows.begin) * t->partial_stride;
        t->mr = mr;
        t->panels = np;
        t->rows = block + row * t->row_bytes;
        t->row_scales = (const uint8_t *)k->x->rows + row * t->row_bytes + column_values_bytes(k->w->k);
        t->row_biases = t->row_scales + COLUMN_SCALE_BYTES + 4 * p->steps.begin;
        t->partial = p->begins_part ? NULL : partial + so_far;
        if (p->ends_part && p->first_part && p->last_part) {
            finish_tile(k, kernel, t, row, panels);
        } else if (p->ends_part) {
            finish_part(k, kernel, t, p, row, panels, total + so_far);
        } else {
            t->out = partial + so_far;
            t->out_stride = t->partial_stride;
            t->add = 0;
            kernel(t);
        }
        t->prefetch_bytes = t->prefetch_jump = 0; /* the other rows find the weights in L1 */
        row += mr;
    }
}

/* A block of rows times one tile of panels, all that the call computes of k. An empty part is zero. */
static void panel_tile(const walk *k, pw_range rows, pw_range panels) {
    const pw_weight *w = k->w;
    float partial[PARTIAL_FLOATS], total[PARTIAL_FLOATS];
    panel_stage stage;
    for (int32_t i = k->first_part; i < k->end_part; ++i) {
        pw_range part = part_steps(k, i);
        pass p = {{part.begin, part.begin}, .first_part = i == k->first_part, .last_part = i + 1 == k->end_part};
        do {
            p.begins_part = p.steps.end == part.begin;
            p.steps = (pw_range){p.steps.end, at_most(p.steps.end + k->block_steps, part.end)};
            p.ends_part = p.steps.end == part.end;
            tile_call t = first_call(k, panels, &p);
            if (k->staged) stage_panels(&t, w->kind, w->group, panels.end - panels.begin, &stage);
            run_pass(k, k->staged && NIBBLES_STAGED && w->kind == PW_Q4 ? &tiles[PW_Q8] : k->tiles, &t, rows, panels, &p,
                     partial, total);
        } while (!p.ends_part);
    }
}

static walk plan_walk(const pw_weight *w, const pw_schedule *s, int64_t rows, int32_t part) {
    walk k = {.w = w, .mr = s->mr, .panels = s->panels, .first_part = part, .end_part = part + 1};
    if (part < 0) k.first_part = 0, k.end_part = w->k_parts;
    int64_t step_inputs = w->kind == PW_F32 ? 1 : w->kind == PW_BF16 ? 2 * BF16_STEP_PAIRS : w->group ? w->group : 32;
    k.step_inputs = step_inputs;
    k.tiles = &tiles[w->kind != PW_Q8 || w->group == 32 ? w->kind : w->group ? Q8_GROUP16 : Q8_COLUMN];
    largest_tile(k.tiles, &k.mr, &k.panels);
    k.steps = w->kind == PW_F32 ? w->k : pw_padded_k(w->k) / step_inputs;
    k.step_value_bytes = step_inputs * VECTOR_ROW_BYTES / inputs_per_vector_row(w->kind);
    k.step_row_bytes = w->kind == PW_F32    ? 4
                       : w->kind == PW_BF16 ? step_inputs * BF16_ACTIVATION_BYTES
                       : w->group           ? group_block_bytes(w->kind, w->group)
                                            : step_inputs * Q8_ACTIVATION_BYTES;
    k.block_steps = clamp(s->block_k / step_inputs, 1, k.steps);
    k.block_n = clamp(s->block_n / k.panels, 1, INT32_MAX) * k.panels;
    k.block_m = clamp(s->block_m, 1, INT32_MAX);
    k.staged = w->kind >= PW_Q8 && w->group && at_most(rows, k.block_m) > 2 * k.mr;
    if (k.staged) k.block_steps = at_most(k.block_steps, STAGED_INPUTS / (k.panels * step_inputs));
    if (k.block_steps < k.steps || w->k_parts > 1) k.block_m = at_most(k.block_m, PARTIAL_FLOATS / (k.panels * PW_PANEL));
    k.prefetch_bytes = clamp(s->prefetch_bytes, 0, INT32_MAX);
    return k;
}

static void block(const walk *k, pw_range rows, pw_range panels) {
    for (int64_t panel = panels.begin; panel < panels.end;) {
        int mr = 1, np = (int)at_most(k->panels, panels.end - panel);
        largest_tile(k->tiles, &mr, &np);
        panel_tile(k, rows, (pw_range){panel, panel + np});
        panel += np;
    }
}

/* Both loops over blocks, either way round. */
static void walk_blocks(const walk *k, pw_range rows, pw_range panels, int rows_outside) {
    pw_range outer = rows_outside ? rows : panels, inner = rows_outside ? panels : rows;
    int64_t outer_size = rows_outside ? k->block_m : k->block_n, inner_size = rows_outside ? k->block_n : k->block_m;
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
    walk k = plan_walk(w, schedule, rows.end - rows.begin, part);
    k.x = x;
    k.y = y;
    k.ldy = ldy;
    k.epilogue = epilogue;
    walk_blocks(&k, rows, panels, schedule->rows_outside);
#ifdef PW_AMX
    tiles_end();
#endif
}

/* One path a kind so far. */
int32_t ISA(path_of)(int32_t kind, int32_t path) {
    (void)path;
    if (kind == PW_F32) return PW_FMA;
    if (kind == PW_BF16) return BF16_STEP_PAIRS > 1 ? PW_BF16_TILE : BF16_ACTIVATION_BYTES == 2 ? PW_BF16_DOT : PW_FMA;
    return PW_INT8_DOT;
}

static int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* Few rows stream weights through many panels at once; more rows share out evenly among tiles of the largest size. */
void ISA(best_tile)(const pw_weight *w, int64_t m, int32_t *mr, int32_t *panels) {
    int kind = w->kind, column = kind == PW_Q8 && w->group == 0, quant = kind >= PW_Q8 && !column;
    int64_t most = quant ? QUANT_MR : column ? COLUMN_MR : DENSE_MR;
    *panels = m <= 2 ? STREAM_PANELS : quant ? QUANT_PANELS : column ? COLUMN_PANELS : DENSE_PANELS;
    if (kind == PW_BF16 && BF16_STEP_PAIRS > 1) {
        *panels = 2;
        most = 32;
    } else if (quant && QUANT_TALL_MR > 0 && m <= 2 * QUANT_TALL_MR && pieces(m, QUANT_TALL_MR) < pieces(m, most)) {
        *panels = QUANT_TALL_PANELS;
        most = QUANT_TALL_MR;
    }
    *mr = (int32_t)(m < 1 ? 1 : m <= 3 * most ? pieces(m, pieces(m, most)) : most);
}
