/* families/gemm.c: walks a share of y = x W^T in blocks and calls micro-kernels; compiled once per ISA.
 *
 * Loops, outermost first: panel blocks (stay in L2), row blocks, tiles of panels, passes over k (a tile's weights
 * stay in L1), tiles of rows. A tile that is not at its last pass keeps its float32 sums in `partial`: storing and
 * loading a float32 is exact, so passes do not change results. Error bounds: gemm_dense.c, gemm_quant.c. */
#include "families/gemm.h"

enum { PARTIAL_FLOATS = 16384, Q8_GROUP16 = PW_KINDS, FORMS };

typedef tile_kernel *tile_table[MAX_MR + 1][MAX_TILE_PANELS + 1];

static const tile_table tiles[FORMS] = {
#define TILE(mr, np) [PW_F32][mr][np] = f32_##mr##x##np, [PW_BF16][mr][np] = bf16_##mr##x##np,
    DENSE_TILES(TILE)
#undef TILE
#define TILE(mr, np)                                                             \
    [PW_Q8][mr][np] = q8_##mr##x##np, [Q8_GROUP16][mr][np] = q8g16_##mr##x##np, \
    [PW_Q4][mr][np] = q4_##mr##x##np,
    QUANT_TILES(TILE)
#undef TILE
};

typedef struct {
    const pw_weight *w;
    const pw_activations *x;
    float *y;
    int64_t ldy;
    pw_epilogue epilogue;
    int mr, panels; /* the largest tile in use */
    int64_t block_m, block_n, block_steps, steps;
    int64_t prefetch_bytes;
    const tile_table *tiles;
} walk;

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

static tile_call first_call(const walk *k, int64_t panel, int64_t row) {
    const pw_weight *w = k->w;
    tile_call t = {0};
    t.row_bytes = k->x->row_bytes;
    t.rows = (const uint8_t *)k->x->rows + row * t.row_bytes;
    t.panel_bytes = pw_padded_k(w->k) / inputs_per_vector_row(w->kind) * VECTOR_ROW_BYTES;
    t.values = (const uint8_t *)w->values + panel * t.panel_bytes;
    t.prefetch_bytes = at_most(k->prefetch_bytes, t.panel_bytes);
    if (!w->scales) return t;
    t.scale_bytes = w->scale_bytes;
    t.panel_scale_bytes = pw_padded_k(w->k) / w->group * PW_PANEL * w->scale_bytes;
    t.scales = (const uint8_t *)w->scales + panel * t.panel_scale_bytes;
    t.mins = w->mins ? (const uint8_t *)w->mins + panel * t.panel_scale_bytes : NULL;
    return t;
}

/* The columns of the last panel that exist go to y, the padding stays behind. */
static void copy_ragged(const walk *k, const tile_call *t, int64_t row, int mr, int64_t column) {
    int64_t columns = k->w->n - column;
    for (int r = 0; r < mr; ++r) {
        const float *from = t->out + r * t->out_stride;
        float *y = k->y + (row + r) * k->ldy + column;
        for (int64_t c = 0; c < columns; ++c) y[c] = k->epilogue == PW_ADD ? y[c] + from[c] : from[c];
    }
}

/* A tile's last pass: straight into y, or by way of a buffer where n ends inside it. */
static void finish_tile(const walk *k, tile_kernel *kernel, tile_call *t, pw_range rows, pw_range panels) {
    float edge[MAX_MR * MAX_TILE_PANELS * PW_PANEL];
    int64_t column = panels.begin * PW_PANEL;
    if (panels.end * PW_PANEL <= k->w->n) {
        t->out = k->y + rows.begin * k->ldy + column;
        t->out_stride = k->ldy;
        t->add = k->epilogue == PW_ADD;
        kernel(t);
        return;
    }
    t->out = edge;
    t->out_stride = (panels.end - panels.begin) * PW_PANEL;
    t->add = 0;
    kernel(t);
    copy_ragged(k, t, rows.begin, (int)(rows.end - rows.begin), column);
}

/* A block of rows times one tile of panels, all of k. */
static void panel_tile(const walk *k, pw_range rows, pw_range panels) {
    float partial[PARTIAL_FLOATS];
    tile_call t = first_call(k, panels.begin, rows.begin);
    const uint8_t *first_row = t.rows;
    t.partial_stride = (panels.end - panels.begin) * PW_PANEL;
    for (t.begin = 0; t.begin < k->steps; t.begin = t.end) {
        t.end = at_most(t.begin + k->block_steps, k->steps);
        t.prefetch_bytes = at_most(k->prefetch_bytes, t.panel_bytes);
        for (int64_t row = rows.begin; row < rows.end;) {
            int mr = (int)at_most(k->mr, rows.end - row), np = (int)(panels.end - panels.begin);
            tile_kernel *kernel = largest_tile(k->tiles, &mr, &np);
            float *so_far = partial + (row - rows.begin) * t.partial_stride;
            t.rows = first_row + (row - rows.begin) * t.row_bytes;
            t.partial = t.begin ? so_far : NULL;
            if (t.end == k->steps) {
                finish_tile(k, kernel, &t, (pw_range){row, row + mr}, panels);
            } else {
                t.out = so_far;
                t.out_stride = t.partial_stride;
                t.add = 0;
                kernel(&t);
            }
            t.prefetch_bytes = 0; /* the other rows find the weights in L1 */
            row += mr;
        }
    }
}

/* The schedule, clamped to what exists. */
static walk plan_walk(const pw_weight *w, const pw_schedule *s) {
    walk k = {.w = w, .mr = s->mr, .panels = s->panels};
    int64_t step_inputs = w->kind == PW_F32 ? 1 : w->kind == PW_BF16 ? 2 : w->group;
    k.tiles = &tiles[w->kind == PW_Q8 && w->group == 16 ? Q8_GROUP16 : w->kind];
    largest_tile(k.tiles, &k.mr, &k.panels);
    k.steps = w->kind == PW_F32 ? w->k : pw_padded_k(w->k) / step_inputs;
    k.block_steps = clamp(s->block_k / step_inputs, 1, k.steps);
    k.block_n = clamp(s->block_n / k.panels, 1, INT32_MAX) * k.panels;
    k.block_m = clamp(s->block_m, 1, INT32_MAX);
    if (k.block_steps < k.steps) k.block_m = at_most(k.block_m, PARTIAL_FLOATS / (k.panels * PW_PANEL));
    k.prefetch_bytes = clamp(s->prefetch_bytes, 0, INT32_MAX);
    return k;
}

void ISA(gemm)(const pw_weight *w, const pw_activations *x, pw_range rows, pw_range panels, float *y, int64_t ldy,
               pw_epilogue epilogue, const pw_schedule *schedule) {
    walk k = plan_walk(w, schedule);
    k.x = x;
    k.y = y;
    k.ldy = ldy;
    k.epilogue = epilogue;
    for (int64_t n = panels.begin; n < panels.end; n += k.block_n) {
        int64_t n_end = at_most(n + k.block_n, panels.end);
        for (int64_t m = rows.begin; m < rows.end; m += k.block_m) {
            pw_range block = {m, at_most(m + k.block_m, rows.end)};
            for (int64_t panel = n; panel < n_end;) {
                int mr = 1, np = (int)at_most(k.panels, n_end - panel);
                largest_tile(k.tiles, &mr, &np);
                panel_tile(&k, block, (pw_range){panel, panel + np});
                panel += np;
            }
        }
    }
}
