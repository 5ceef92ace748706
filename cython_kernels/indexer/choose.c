/* A position's score is the sum over the indexer's heads of weight * max(0, query . key), and a row sees the shape's `chosen`
 * positions of the largest scores, the earlier of equals; a row at an earlier position sees all. Scores depend on the row and
 * on positions alone. Of a step in which every slice has one token, chunks of positions are divided over the threads of
 * all ranks; of any other step, rows are. */
#include <stdlib.h>
#include <string.h>

#include "program/attend.h"
#include "indexer/choose.h"

typedef struct {
    const pw_run *run;
    const pw_op *op;
    pw_kv_head keys; /* behind the latent vectors */
    int64_t padded;  /* heads, up to a multiple of 16 */
    float *weights, *q, *chunk, *scores, *heap;
    int64_t *order;
} indexing;

/* Carves the scratch out of `memory`; returns the floats used. */
static int64_t carve(const pw_program *program, const pw_op *op, float *memory, indexing *own) {
    int64_t padded = (op->latent.step + PW_PANEL - 1) / PW_PANEL * PW_PANEL, chosen = program->shape.chosen, at = 0;
    own->padded = padded;
    own->order = (int64_t *)memory, at += 2 * chosen;
    own->weights = memory + at, at += padded;
    own->q = memory + at, at += padded * program->shape.index;
    own->chunk = memory + at, at += pw_latent_scratch(padded);
    own->scores = memory + at, at += program->capacity.kv_slots + PW_CHUNK;
    own->heap = memory + at, at += chosen;
    return at;
}

int64_t pw_choice_floats(const pw_program *program) {
    static float nothing[1];
    indexing measured;
    int64_t most = 0;
    for (int32_t i = 0; i < program->n_ops; ++i) {
        int64_t floats = program->ops[i].code == PW_INDEX ? carve(program, &program->ops[i], nothing, &measured) : 0;
        if (floats > most) most = floats;
    }
    return most;
}

/* A query or key of a row with its first numbers turned. */
static void turn(const indexing *a, int64_t row, const float *x, float *out) {
    memcpy(out, x, sizeof(float) * (size_t)a->run->program->shape.index);
    pw_turn_row(a->run, a->op, row, 1.0f, x, out);
}

static void store_key(const indexing *a, int64_t row) {
    const pw_program *program = a->run->program;
    const pw_op *op = a->op;
    const pw_norm norm = {op->norm, op->norm_bias, op->eps};
    float normed[PW_MAX_INDEX_DIM], turned[PW_MAX_INDEX_DIM];
    const float *key = program->arena + op->latent.vector + row * op->latent.vector_stride;
    a->run->kernels->ops.layernorm(program->shape.index, key, NULL, &norm, normed);
    turn(a, row, normed, turned);
    a->run->kernels->ops.store_value(&a->keys, program->step.slots[row], turned);
}

static bool has_choice(const pw_program *program, int64_t row) { return program->step.positions[row] >= program->shape.chosen; }

/* A row's queries, a column each, and their weights. */
static pw_queries load_row(const indexing *a, int64_t row) {
    const pw_program *program = a->run->program;
    const pw_latent_op *own = &a->op->latent;
    int64_t dim = program->shape.index;
    float x[PW_MAX_INDEX_DIM];
    memset(a->weights, 0, sizeof(float) * (size_t)(a->padded * (1 + dim))); /* q is behind them */
    memcpy(a->weights, program->arena + own->query + row * own->query_stride, sizeof(float) * (size_t)own->step);
    for (int64_t head = 0; head < own->step; ++head) {
        turn(a, row, program->arena + a->op->in + row * a->op->in_stride + head * dim, x);
        for (int64_t i = 0; i < dim; ++i) a->q[i * a->padded + head] = x[i];
    }
    return (pw_queries){.q = a->q, .rows = (int32_t)own->step};
}

static void score_chunk(const indexing *a, const pw_queries *queries, const pw_slice *slice, int64_t position, int64_t chunk,
                        float *scores) {
    const pw_program *program = a->run->program;
    int64_t left = position + 1 - chunk * PW_CHUNK, slot = pw_chunk_slot_in(program, a->op->layer, slice, chunk);
    a->run->kernels->ops.score_keys(&a->keys, queries, a->weights, slot, left < PW_CHUNK ? left : PW_CHUNK, a->chunk, scores);
}

static int ascending(const void *a, const void *b) {
    int64_t first = *(const int64_t *)a, second = *(const int64_t *)b;
    return (first > second) - (first < second);
}

static void choose(const indexing *a, int64_t row, const float *scores) {
    const pw_program *program = a->run->program;
    int64_t count = program->shape.chosen;
    a->run->kernels->ops.top_k(program->step.positions[row] + 1, scores, count, a->heap, a->order);
    qsort(a->order, (size_t)count, sizeof *a->order, ascending);
    for (int64_t i = 0; i < count; ++i) program->chosen[row * count + i] = (int32_t)a->order[i];
}

/* A member's chunks of all slices, and then its slices. */
static void index_split(const indexing *a, pw_run *run, int member) {
    const pw_program *program = run->program;
    const pw_step *step = &program->step;
    const int64_t *first_part = step->plans[a->op->kind].first_part, last = step->n_slices - 1;
    pw_range parts = pw_rows_of(run, first_part[last] + step->slices[last].start / PW_CHUNK + 1, member);
    for (int64_t slice = 0; slice <= last; ++slice) {
        int64_t row = step->slices[slice].first_row, position = step->positions[row], first = first_part[slice];
        int64_t begin = parts.begin > first ? parts.begin : first, end = first + position / PW_CHUNK + 1;
        if (parts.end < end) end = parts.end;
        if (begin >= end || !has_choice(program, row)) continue;
        pw_queries queries = load_row(a, row);
        for (int64_t part = begin; part < end; ++part)
            score_chunk(a, &queries, &step->slices[slice], position, part - first, program->index_scores + part * PW_CHUNK);
    }
    if (!pw_meet(run, member)) return;
    pw_range slices = pw_rows_of(run, step->n_slices, member);
    for (int64_t slice = slices.begin; slice < slices.end; ++slice)
        if (has_choice(program, step->slices[slice].first_row))
            choose(a, step->slices[slice].first_row, program->index_scores + first_part[slice] * PW_CHUNK);
}

/* Rows one by one in turns, since later ones have more positions. */
static void index_rows(const indexing *a, pw_run *run, int member) {
    const pw_step *step = &run->program->step;
    int64_t rows = pw_op_rows(run, a->op), slice = 0;
    int64_t threads = run->division->ranks == 1 ? run->threads : run->division->n_threads;
    for (int64_t i = pw_rows_of(run, threads, member).begin; i < rows; i += threads) {
        int64_t row = a->op->rows == PW_EVERY_ROW ? i : step->logit_rows[i], position = step->positions[row];
        if (!has_choice(run->program, row)) continue;
        while (row >= step->slices[slice].first_row + step->slices[slice].n_rows) ++slice;
        pw_queries queries = load_row(a, row);
        for (int64_t chunk = 0; chunk <= position / PW_CHUNK; ++chunk)
            score_chunk(a, &queries, &step->slices[slice], position, chunk, a->scores + chunk * PW_CHUNK);
        choose(a, row, a->scores);
    }
}

void pw_run_choose(pw_run *run, const pw_op *op, int member) {
    pw_program *program = run->program;
    indexing a = {.run = run, .op = op, .keys = pw_kv_head_of(program, op->layer, 0, 0)};
    carve(program, op, (float *)(program->scratch + member * program->scratch_bytes), &a);
    a.keys.values = (char *)a.keys.values + a.keys.head_dim * pw_kv_element_bytes(a.keys.format);
    a.keys.head_dim = program->shape.index;
    pw_range rows = pw_rows_of(run, program->step.n_tokens, member);
    for (int64_t row = rows.begin; row < rows.end; ++row) store_key(&a, row);
    if (!pw_meet(run, member)) return;
    if (program->step.split) index_split(&a, run, member);
    else index_rows(&a, run, member);
}
