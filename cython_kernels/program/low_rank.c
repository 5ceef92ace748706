#include "program/low_rank.h"

#include <stdlib.h>
#include <string.h>

enum { LINE = 64, FLOATS_OF_LINE = LINE / sizeof(float) };

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- building --------------------------------------------------------------------------------------------------- */

bool pw_program_adapt(pw_program *program, int32_t op, int32_t adapter, const pw_low_rank *low_rank) {
    pw_op *adapted = &program->ops[op];
    if (!adapted->low_rank) adapted->low_rank = calloc(PW_MAX_ADAPTERS, sizeof *adapted->low_rank);
    if (!adapted->low_rank) return false;
    adapted->low_rank[adapter - 1] = *low_rank;
    program->n_adapters = (int32_t)larger(program->n_adapters, adapter);
    return true;
}

/* The largest row that enters a first product on any ISA, and the most numbers that one gives. */
static void measure(const pw_program *program, int64_t *row_bytes, int64_t *low_floats) {
    *row_bytes = *low_floats = 0;
    for (int32_t i = 0; i < program->n_ops; ++i)
        for (int32_t a = 0; program->ops[i].low_rank && a < program->n_adapters; ++a) {
            const pw_low_rank *own = &program->ops[i].low_rank[a];
            if (own->n_targets == 0) continue;
            pw_form form = pw_form_of(&own->down);
            for (int isa = 0; isa < pw_usable_count(); ++isa)
                *row_bytes = larger(*row_bytes, pw_usable(isa)->gemm.row_bytes(&form, own->down.k));
            *low_floats = larger(*low_floats, pw_padded_k(own->down.n) + PW_K_MULTIPLE);
        }
    *row_bytes = (*row_bytes + LINE - 1) / LINE * LINE;
    *low_floats = (*low_floats + FLOATS_OF_LINE - 1) / FLOATS_OF_LINE * FLOATS_OF_LINE;
}

int64_t pw_low_rank_bytes(const pw_program *program) {
    int64_t row_bytes, low_floats;
    measure(program, &row_bytes, &low_floats);
    return pw_most_rows(&program->capacity) * (row_bytes + low_floats * (int64_t)sizeof(float));
}

bool pw_low_rank_open(pw_program *program, char *memory) {
    pw_low_rows *low = &program->low;
    int64_t rows = pw_most_rows(&program->capacity);
    if (program->n_adapters == 0) return true;
    measure(program, &low->row_bytes, &low->stride);
    low->taken = memory;
    low->low = (float *)(memory + rows * low->row_bytes);
    for (int i = 0; i < 2; ++i) {
        low->adapted[i].rows = calloc((size_t)rows, sizeof *low->adapted[i].rows);
        low->adapted[i].places = calloc((size_t)rows, sizeof *low->adapted[i].places);
        low->adapted[i].first = calloc((size_t)program->n_adapters + 1, sizeof *low->adapted[i].first);
        if (!low->adapted[i].rows || !low->adapted[i].places || !low->adapted[i].first) return false;
    }
    return true;
}

void pw_low_rank_close(pw_program *program) {
    for (int32_t i = 0; i < program->n_ops; ++i) free(program->ops[i].low_rank);
    for (int i = 0; i < 2; ++i) {
        free(program->low.adapted[i].rows);
        free(program->low.adapted[i].places);
        free(program->low.adapted[i].first);
    }
}

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
            if (pass == 0) adapted->places[i] = -1;
            if (adapter == 0) continue;
            if (pass == 0) adapted->first[adapter] += 1;
            else adapted->rows[adapted->places[i] = adapted->first[adapter - 1]++] = i;
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

static const pw_low_rank *adapter_at(const pw_program *program, const pw_op *op, const pw_adapted *adapted, int64_t place) {
    int32_t a = 0;
    while (place >= adapted->first[a + 1]) ++a;
    return a < program->n_adapters ? &op->low_rank[a] : NULL;
}

void pw_low_rank_take(const pw_run *run, const pw_op *op, const pw_adapted *adapted, int64_t row, const float *x) {
    const pw_program *program = run->program;
    int64_t place = adapted->places[row];
    const pw_low_rank *own = place < 0 ? NULL : adapter_at(program, op, adapted, place);
    if (!own || own->n_targets == 0) return;
    pw_form form = pw_form_of(&own->down);
    char *taken = program->low.taken + place * program->low.row_bytes;
    run->kernels->gemm.prepare_rows(&form, own->down.k, x, 0, (pw_range){0, 1}, taken);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

static void multiply(const pw_run *run, const pw_weight *weight, pw_activations x, int64_t rows, pw_range panels, float *y,
                     int64_t ldy, pw_epilogue epilogue) {
    pw_schedule schedule = pw_default_schedule(weight, rows, 1);
    run->kernels->gemm.gemm(weight, &x, (pw_range){0, rows}, panels, -1, y, ldy, epilogue, &schedule);
}

/* `count` places of one adapter times some panels of its A, and scaled. Behind the last number are zeros, as far as a product
 * with weights of pairs reads them. */
static void down(const pw_run *run, const pw_low_rank *own, int64_t place, int64_t count, pw_range panels) {
    const pw_low_rows *low = &run->program->low;
    if (count == 0 || panels.begin == panels.end) return;
    float *y = low->low + place * low->stride;
    pw_activations x = {low->taken + place * low->row_bytes, low->row_bytes};
    multiply(run, &own->down, x, count, panels, y, low->stride, PW_STORE);
    int64_t end = smaller(panels.end * PW_PANEL, own->down.n);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t c = panels.begin * PW_PANEL; c < end; ++c) y[i * low->stride + c] *= own->scales[c];
    if (end < own->down.n) return;
    for (int64_t i = 0; i < count; ++i)
        memset(y + i * low->stride + end, 0, sizeof(float) * (size_t)(low->stride - end));
}

/* Pieces are a row's panels, row by row: members have as many of them, whichever rows and adapters those are of. */
void pw_run_low_rank_down(const pw_run *run, const pw_op *op, const pw_adapted *adapted, int member) {
    const pw_program *program = run->program;
    int64_t pieces = 0, before = 0;
    for (int32_t a = 0; a < program->n_adapters; ++a)
        if (op->low_rank[a].n_targets)
            pieces += (adapted->first[a + 1] - adapted->first[a]) * pw_panels(op->low_rank[a].down.n);
    pw_range all = pw_rows_of(run, pieces, member);
    for (int32_t a = 0; a < program->n_adapters; ++a) {
        const pw_low_rank *own = &op->low_rank[a];
        int64_t first = adapted->first[a], rows = adapted->first[a + 1] - first, each = pw_panels(own->down.n);
        if (own->n_targets == 0 || rows == 0) continue;
        int64_t begin = larger(all.begin - before, 0), end = smaller(all.end - before, rows * each);
        before += rows * each;
        if (begin >= end) continue;
        int64_t head = begin / each, tail = end / each; /* rows of which this member has not all panels before, after */
        if (head == tail) {
            down(run, own, first + head, 1, (pw_range){begin % each, end % each});
            continue;
        }
        if (begin % each) {
            down(run, own, first + head, 1, (pw_range){begin % each, each});
            head += 1;
        }
        down(run, own, first + head, tail - head, (pw_range){0, each});
        if (end % each) down(run, own, first + tail, 1, (pw_range){0, end % each});
    }
}

/* Some panels of a target for all rows of an adapter; neighbours of the step's rows together. */
static void up(const pw_run *run, const pw_op *op, const pw_adapted *adapted, int32_t a, const pw_low_rank_target *target,
               pw_range panels) {
    const pw_low_rows *low = &run->program->low;
    float *out = run->program->arena + op->out + target->column;
    int64_t end = adapted->first[a + 1];
    for (int64_t place = adapted->first[a], count; place < end; place += count) {
        int64_t row = adapted->rows[place];
        for (count = 1; place + count < end && adapted->rows[place + count] == row + count;) ++count;
        pw_activations x = {low->low + place * low->stride + target->from, low->stride * (int64_t)sizeof(float)};
        multiply(run, &target->up, x, count, panels, out + row * op->out_stride, op->out_stride, PW_ADD);
    }
}

void pw_run_low_rank_up(const pw_run *run, const pw_op *op, const pw_adapted *adapted, int member) {
    const pw_program *program = run->program;
    for (int32_t a = 0; a < program->n_adapters; ++a)
        for (int32_t t = 0; adapted->first[a + 1] > adapted->first[a] && t < op->low_rank[a].n_targets; ++t) {
            const pw_low_rank_target *target = &op->low_rank[a].targets[t];
            pw_range own = pw_rows_of(run, pw_panels(target->up.n), member);
            if (own.begin < own.end) up(run, op, adapted, a, target, own);
        }
}
