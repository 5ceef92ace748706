#include "team/product.h"

#include <string.h>

enum {
    STREAMED_ROWS = 8,     /* up to here memory is the limit, and long runs of panels arrive fastest */
    PIECES_PER_REGION = 6, /* beyond it, the least number of pieces, for threads that help out */
};

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t clamp(int64_t x, int64_t low, int64_t high) { return at_least(low, at_most(x, high)); }
static int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

int64_t pw_split_floats(const pw_weight *weight, int64_t rows) {
    return weight->k_parts * rows * pw_panels(weight->n) * PW_PANEL;
}

void pw_clear_tickets(pw_ticket *tickets, int count, int threads, int member) {
    for (int i = count * member / threads; i < count * (member + 1) / threads; ++i)
        atomic_store_explicit(&tickets[i].next, 0, memory_order_relaxed);
}

/* ---- regions ---------------------------------------------------------------------------------------------------- */

/* The schedule with a grid that the product, the scratch and the tickets have room for. */
static pw_schedule fitted(const pw_schedule *schedule, const pw_product *p, const pw_crew *crew) {
    const pw_weight *w = p->weight;
    pw_schedule s = *schedule;
    s.mr = (int32_t)clamp(s.mr, 1, p->rows);
    s.panels = (int32_t)clamp(s.panels, 1, pw_panels(w->n));
    s.threads_m = (int32_t)clamp(s.threads_m, 1, pieces(p->rows, s.mr));
    s.threads_n = (int32_t)clamp(s.threads_n, 1, pw_panels(w->n));
    int split = s.threads_k > 1 && w->k_parts > 1 && crew->split && pw_split_floats(w, p->rows) <= crew->split_floats;
    s.threads_k = split ? w->k_parts : 1;
    if ((int64_t)s.threads_m * s.threads_n <= crew->most_regions / s.threads_k) return s;
    s.threads_m = s.threads_k = 1;
    s.threads_n = (int32_t)at_most(crew->most_regions, pw_panels(w->n));
    return s;
}

typedef struct {
    pw_range rows, panels;
    int32_t part; /* of k; -1: all of it */
    int64_t piece_rows, piece_panels, row_pieces, panel_pieces;
} region;

/* The size of `wanted` pieces or more of whole tiles, where there are as many tiles; none larger than `most`. */
static int64_t piece_panels(int64_t count, int64_t tile, int64_t most, int64_t wanted) {
    int64_t fair = at_least(1, at_most(pieces(count, wanted), most));
    return at_least(tile, fair / tile * tile);
}

/* Of `wanted` pieces or fewer: every piece reads its weights anew, so none is made for what is left of whole tiles. */
static int64_t piece_rows(int64_t count, int64_t tile, int64_t most, int64_t wanted) {
    int64_t fair = pieces(pieces(count, wanted), tile) * tile;
    return fair < most ? fair : at_least(tile, most / tile * tile);
}

/* Along the outermost loop first: the inner one then finds what it reads again in a cache. */
static void cut(region *r, const pw_schedule *s, int64_t wanted) {
    int64_t rows = at_least(1, r->rows.end - r->rows.begin), panels = at_least(1, r->panels.end - r->panels.begin);
    if (s->loop_order == PW_LOOP_MN) {
        r->piece_rows = piece_rows(rows, s->mr, s->block_m, wanted);
        r->piece_panels = piece_panels(panels, s->panels, panels, pieces(wanted, pieces(rows, r->piece_rows)));
    } else {
        r->piece_panels = piece_panels(panels, s->panels, s->block_n / PW_PANEL, wanted);
        r->piece_rows = piece_rows(rows, s->mr, INT64_MAX, pieces(wanted, pieces(panels, r->piece_panels)));
    }
    bool is_empty = r->rows.begin == r->rows.end || r->panels.begin == r->panels.end;
    r->row_pieces = is_empty ? 0 : pieces(rows, r->piece_rows);
    r->panel_pieces = pieces(panels, r->piece_panels);
}

pw_range pw_weighed_part(int64_t count, int64_t unit, const int64_t *ends, int64_t parts, int64_t i) {
    int64_t units = pieces(count, unit), all = ends[parts];
    return (pw_range){at_most(count, units * ends[i] / all * unit), at_most(count, units * ends[i + 1] / all * unit)};
}

/* The weights of members that have a region each, side by side or one below the other; NULL: all regions are alike. */
static const int64_t *ends_of(const pw_product *p, const pw_schedule *s, const pw_crew *crew) {
    bool in_a_row = s->threads_k == 1 && (s->threads_m == 1 || s->threads_n == 1);
    if (!crew->team || !in_a_row || s->threads_m * s->threads_n != crew->threads) return NULL;
    return pw_team_ends(crew->team, p->rows <= STREAMED_ROWS);
}

static region region_of(const pw_product *p, const pw_schedule *s, const pw_crew *crew, int32_t index) {
    region r = {.part = s->threads_k > 1 ? index % s->threads_k : -1};
    const int64_t *ends = ends_of(p, s, crew);
    pw_share(s, p->weight, p->rows, index / s->threads_k, &r.rows, &r.panels);
    if (ends && s->threads_m > 1) r.rows = pw_weighed_part(p->rows, s->mr, ends, crew->threads, index);
    else if (ends) r.panels = pw_weighed_part(pw_panels(p->weight->n), 1, ends, crew->threads, index);
    cut(&r, s, p->rows <= STREAMED_ROWS ? 1 : PIECES_PER_REGION);
    return r;
}

static pw_range piece(pw_range whole, int64_t size, int64_t index) {
    int64_t begin = whole.begin + index * size;
    return (pw_range){begin, at_most(begin + size, whole.end)};
}

/* ---- pieces ----------------------------------------------------------------------------------------------------- */

/* Columns of y that a range of panels holds. */
static pw_range columns_of(const pw_product *p, pw_range panels) {
    int64_t n = p->weight->n;
    return (pw_range){at_most(panels.begin * PW_PANEL, n), at_most(panels.end * PW_PANEL, n)};
}

static void copy_base(const pw_product *p, pw_range rows, pw_range panels) {
    pw_range columns = columns_of(p, panels);
    size_t bytes = sizeof(float) * (size_t)(columns.end - columns.begin);
    for (int64_t row = rows.begin; row < rows.end; ++row)
        memcpy(p->y + row * p->ldy + columns.begin, p->base + p->base_rows[row] * p->base_stride + columns.begin,
               bytes);
}

static void multiply_piece(const pw_product *p, const pw_schedule *s, const pw_crew *crew, pw_range rows,
                           pw_range panels, int32_t part) {
    const pw_weight *w = p->weight;
    if (part < 0) {
        if (p->base) copy_base(p, rows, panels);
        crew->kernels->gemm(w, &p->x, rows, panels, part, p->y, p->ldy, p->epilogue, s);
        if (p->finish) p->finish(p->what, rows, columns_of(p, panels));
        return;
    }
    int64_t stride = pw_panels(w->n) * PW_PANEL;
    crew->kernels->gemm(w, &p->x, rows, panels, part, crew->split + part * p->rows * stride, stride, PW_STORE, s);
}

/* Takes pieces of a region until none is left. */
static void work_on(const region *r, const pw_product *p, const pw_schedule *s, const pw_crew *crew,
                    pw_ticket *ticket) {
    int64_t count = r->row_pieces * r->panel_pieces;
    while (atomic_load_explicit(&ticket->next, memory_order_relaxed) < count) {
        int64_t i = atomic_fetch_add_explicit(&ticket->next, 1, memory_order_relaxed);
        if (i >= count) return;
        int64_t row = s->loop_order == PW_LOOP_MN ? i / r->panel_pieces : i % r->row_pieces;
        int64_t panel = s->loop_order == PW_LOOP_MN ? i % r->panel_pieces : i / r->row_pieces;
        multiply_piece(p, s, crew, piece(r->rows, r->piece_rows, row), piece(r->panels, r->piece_panels, panel),
                       r->part);
    }
}

/* A member's columns of the finished sums, ((P0 + P1) + P2) + .., as gemm stores them. */
static void add_parts(const pw_product *p, const pw_crew *crew, int member) {
    const pw_weight *w = p->weight;
    int64_t panels = pw_panels(w->n), stride = panels * PW_PANEL;
    pw_range own = {panels * member / crew->threads, panels * (member + 1) / crew->threads};
    pw_range columns = columns_of(p, own);
    if (p->base) copy_base(p, (pw_range){0, p->rows}, own);
    for (int64_t row = 0; row < p->rows; ++row) {
        float *y = p->y + row * p->ldy;
        for (int64_t c = columns.begin; c < columns.end; ++c) {
            const float *first = crew->split + row * stride + c;
            float sum = *first;
            for (int32_t part = 1; part < w->k_parts; ++part) sum += first[part * p->rows * stride];
            y[c] = p->epilogue == PW_ADD ? y[c] + sum : sum;
        }
    }
    if (p->finish) p->finish(p->what, (pw_range){0, p->rows}, columns);
}

void pw_multiply(const pw_product *p, const pw_schedule *schedule, const pw_crew *crew, int member) {
    pw_range all_rows = {0, p->rows}, all_panels = {0, pw_panels(p->weight->n)};
    if (crew->threads == 1) {
        multiply_piece(p, schedule, crew, all_rows, all_panels, -1);
        return;
    }
    pw_schedule s = fitted(schedule, p, crew);
    int32_t regions = s.threads_m * s.threads_n * s.threads_k;
    int32_t own = (int32_t)((int64_t)regions * member / crew->threads);
    for (int32_t i = 0; i < regions; ++i) {
        int32_t index = (own + i) % regions;
        region r = region_of(p, &s, crew, index);
        work_on(&r, p, &s, crew, &crew->tickets[index]);
    }
    if (s.threads_k == 1) return;
    pw_team_barrier(crew->team, member);
    add_parts(p, crew, member);
}
