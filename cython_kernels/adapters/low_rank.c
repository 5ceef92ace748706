#include "adapters/low_rank.h"

#include <string.h>

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- a step ----------------------------------------------------------------------------------------------------- */

/* A counting sort of rows by the adapters of their slices; `row_at` NULL: all rows of the step. */
static void sort_rows(const pw_program *program, pw_adapted *adapted, int64_t count, const int64_t *row_at) {
    const pw_step *step = &program->step;
    int32_t n = program->n_adapters;
    memset(adapted->first, 0, sizeof *adapted->first * (size_t)(n + 1));
    for (int pass = 0; pass < 2; ++pass) {
        for (int64_t i = 0, s = 0; i < count; ++i) {
            int64_t row = row_at ? row_at[i] : i;
            while (row >= step->slices[s].first_row + step->slices[s].n_rows) ++s;
            int64_t adapter = step->slices[s].adapter;
            if (adapter == 0) continue;
            if (pass == 0) adapted->first[adapter] += 1;
            else adapted->rows[adapted->first[adapter - 1]++] = i;
        }
        if (pass == 0)
            for (int32_t a = 0; a < n; ++a) adapted->first[a + 1] += adapted->first[a];
    }
    for (int32_t a = n; a > 0; --a) adapted->first[a] = adapted->first[a - 1];
    adapted->first[0] = 0;
}

const char *pw_low_rank_check(pw_program *program) {
    const pw_step *step = &program->step;
    int64_t named = 0;
    for (int64_t s = 0; s < step->n_slices; ++s) {
        if (step->slices[s].adapter < 0 || step->slices[s].adapter > program->n_adapters)
            return "a slice names an adapter that is not there";
        named |= step->slices[s].adapter;
    }
    program->low.is_used = named != 0;
    if (!named) return NULL;
    sort_rows(program, &program->low.adapted[0], step->n_tokens, NULL);
    sort_rows(program, &program->low.adapted[1], step->n_logit_rows, step->logit_rows);
    return NULL;
}

const pw_adapted *pw_adapted_rows(const pw_program *program, const pw_op *op) {
    if (!program->low.is_used || !op->low_rank) return NULL;
    const pw_adapted *adapted = &program->low.adapted[op->rows == PW_EVERY_ROW ? 0 : 1];
    for (int32_t a = 0; a < program->n_adapters; ++a)
        if (op->low_rank[a].n_targets && adapted->first[a + 1] > adapted->first[a]) return adapted;
    return NULL;
}

/* ---- first products --------------------------------------------------------------------------------------------- */

/* A row of the op as it enters a first product. */
static const float *row_of(const pw_run *run, const pw_op *op, int64_t row, int member) {
    const pw_program *program = run->program;
    char *scratch = program->scratch + member * program->scratch_bytes;
    return pw_op_input(run, op, row, (float *)(scratch + PW_MAX_PARTS * program->private_row_bytes));
}

/* `count` rows x, whose places begin at `place`, times some panels of A, and scaled. */
static void multiply_down(const pw_run *run, const pw_low_rank *own, const float *x, int64_t place, int64_t count,
                          pw_range panels) {
    const pw_low_rows *low = &run->program->low;
    int64_t begin = panels.begin * PW_PANEL, end = smaller(panels.end * PW_PANEL, own->down.n);
    float *y = low->low + place * low->low_stride;
    for (int64_t i = 0; i < count; ++i)
        memset(y + i * low->low_stride + begin, 0, sizeof *y * (size_t)(end - begin));
    pw_thin_rows rows = {x, low->taken_stride, y, low->low_stride, low->in_order, count};
    run->kernels->ops.add_low_rank(&own->down, panels.begin, panels.end, &rows);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t c = begin; c < end; ++c) y[i * low->low_stride + c] *= own->scales[c];
}

/* The first place of an adapter whose row is not before `row`. */
static int64_t place_of(const pw_adapted *adapted, int32_t a, int64_t row) {
    int64_t low = adapted->first[a], high = adapted->first[a + 1];
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (adapted->rows[middle] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Those of the rows that the member prepares anyway, an adapter's together. */
static void down_own_rows(const pw_run *run, const pw_op *op, const pw_adapted *adapted, pw_range own, int member) {
    const pw_program *program = run->program;
    for (int32_t a = 0; a < program->n_adapters; ++a) {
        const pw_low_rank *low_rank = &op->low_rank[a];
        if (low_rank->n_targets == 0) continue;
        int64_t place = place_of(adapted, a, own.begin), end = place_of(adapted, a, own.end);
        float *taken = program->low.taken + place * program->low.taken_stride;
        if (place >= end) continue;
        for (int64_t i = 0; i < end - place; ++i) {
            const float *x = row_of(run, op, adapted->rows[place + i], member);
            memcpy(taken + i * program->low.taken_stride, x, sizeof *x * (size_t)op->k);
        }
        multiply_down(run, low_rank, taken, place, end - place, (pw_range){0, pw_panels(low_rank->down.n)});
    }
}

/* Fewer rows than members: a piece is a panel of a row, which its member takes for itself. */
static void down_pieces(const pw_run *run, const pw_op *op, const pw_adapted *adapted, int member) {
    const pw_program *program = run->program;
    int64_t pieces = 0, before = 0;
    for (int32_t a = 0; a < program->n_adapters; ++a)
        if (op->low_rank[a].n_targets)
            pieces += (adapted->first[a + 1] - adapted->first[a]) * pw_panels(op->low_rank[a].down.n);
    pw_range own = pw_rows_of(run, pieces, member);
    for (int32_t a = 0; a < program->n_adapters; ++a) {
        const pw_low_rank *low_rank = &op->low_rank[a];
        int64_t each = pw_panels(low_rank->down.n);
        for (int64_t place = adapted->first[a]; low_rank->n_targets && place < adapted->first[a + 1]; ++place, before += each) {
            pw_range panels = {larger(own.begin - before, 0), smaller(own.end - before, each)};
            if (panels.begin >= panels.end) continue;
            multiply_down(run, low_rank, row_of(run, op, adapted->rows[place], member), place, 1, panels);
        }
    }
}

void pw_run_low_rank_down(const pw_run *run, const pw_op *op, const pw_adapted *adapted, pw_range own, int member) {
    int64_t rows = adapted->first[run->program->n_adapters];
    if (rows < run->division->n_threads || rows < run->threads) down_pieces(run, op, adapted, member);
    else down_own_rows(run, op, adapted, own, member);
}

/* ---- second products -------------------------------------------------------------------------------------------- */

void pw_add_low_rank(const void *what, pw_range rows, pw_range columns) {
    const pw_low_rank_addition *to = what;
    const pw_program *program = to->run->program;
    const pw_low_rows *low = &program->low;
    for (int32_t a = 0; a < program->n_adapters; ++a) {
        int64_t place = place_of(to->adapted, a, rows.begin), count = place_of(to->adapted, a, rows.end) - place;
        for (int32_t t = 0; count && t < to->op->low_rank[a].n_targets; ++t) {
            const pw_low_rank_target *target = &to->op->low_rank[a].targets[t];
            int64_t begin = larger(to->column + columns.begin - target->column, 0);
            int64_t end = smaller(to->column + columns.end - target->column, target->up.n);
            if (begin >= end) continue;
            pw_thin_rows added = {low->low + place * low->low_stride + target->from, low->low_stride,
                                  program->arena + to->op->out + target->column, to->op->out_stride,
                                  to->adapted->rows + place, count};
            to->run->kernels->ops.add_low_rank(&target->up, begin / PW_PANEL, pw_panels(end), &added);
        }
    }
}
