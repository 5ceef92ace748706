/* A position's score is the sum over the indexer's heads of weight * max(0, query . key), and a row sees the shape's `chosen`
 * positions of the largest scores, the earlier of equals; a row at an earlier position sees all. Scores depend on the row and
 * on positions alone. Of a step in which every slice has one token, chunks of positions are divided over the threads of
 * all ranks; of any other step, rows are. */
#include <string.h>

#include "program/attend.h"
#include "indexer/choose.h"

typedef struct {
    const pw_run *run;
    const pw_op *op;
    pw_kv_head keys; /* behind the latent vectors */
    int64_t padded;  /* heads, up to a multiple of 16 */
    float *weights, *q, *chunk, *scores;
} indexing;

/* Carves the scratch out of `memory`; returns the floats used. */
static int64_t carve(const pw_program *program, const pw_op *op, float *memory, indexing *own) {
    int64_t padded = (op->latent.step + PW_PANEL - 1) / PW_PANEL * PW_PANEL, at = 0;
    own->padded = padded;
    own->weights = memory + at, at += padded;
    own->q = memory + at, at += padded * program->shape.index;
    own->chunk = memory + at, at += pw_latent_scratch(padded);
    own->scores = memory + at, at += program->capacity.kv_slots + PW_CHUNK;
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

/* Whole numbers in the order of scores, zeros alike and NaN below all. */
static uint32_t in_order(float score) {
    uint32_t bits;
    score += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &score, sizeof bits);
    return score != score ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The k-th largest of n numbers, byte by byte, and how many of its equals are among the k largest. */
static uint32_t largest(int64_t n, const uint32_t *x, int64_t k, int64_t *equals) {
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {0};
        for (int64_t i = 0; i < n; ++i) count[x[i] >> shift & 255] += (x[i] & mask) == found;
        uint32_t byte = 255;
        for (; count[byte] < k; --byte) k -= count[byte];
        found |= byte << shift;
        mask |= 255u << shift;
    }
    *equals = k;
    return found;
}

static void choose(const indexing *a, const pw_slice *slice, int64_t row, float *scores) {
    const pw_program *program = a->run->program;
    int64_t count = program->step.positions[row] + 1, equals, base = 0;
    uint32_t *numbers = (uint32_t *)scores; /* in their place */
    int32_t *chosen = program->chosen + row * program->shape.chosen;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t number = in_order(scores[i]);
        memcpy(numbers + i, &number, sizeof number);
    }
    uint32_t least = largest(count, numbers, program->shape.chosen, &equals);
    for (int64_t i = 0; i < count; ++i) {
        if (i % PW_CHUNK == 0) base = pw_chunk_slot_in(program, a->op->layer, slice, i / PW_CHUNK) - i;
        if (numbers[i] > least || (numbers[i] == least && equals-- > 0)) *chosen++ = (int32_t)(base + i);
    }
}

/* Chunks that are scored for a slice of one token. */
static int64_t chunks_to_score(const pw_program *program, const pw_slice *slice) {
    return pw_has_choice(program, slice->start) ? slice->start / PW_CHUNK + 1 : 0;
}

/* A member's chunks of all slices, and then its slices. */
static void index_split(const indexing *a, pw_run *run, int64_t chunks, int member) {
    const pw_program *program = run->program;
    const pw_step *step = &program->step;
    pw_range own = pw_rows_of(run, chunks, member), slices = pw_rows_of(run, step->n_slices, member);
    int64_t first = 0;
    for (const pw_slice *slice = step->slices; slice < step->slices + step->n_slices; ++slice) {
        int64_t begin = own.begin > first ? own.begin : first, end = first + chunks_to_score(program, slice);
        if (own.end < end) end = own.end;
        if (begin < end) {
            pw_queries queries = load_row(a, slice->first_row);
            for (int64_t i = begin; i < end; ++i)
                score_chunk(a, &queries, slice, slice->start, i - first, program->index_scores + i * PW_CHUNK);
        }
        first += chunks_to_score(program, slice);
    }
    if (!pw_meet(run, member)) return;
    first = 0;
    for (int64_t s = 0; s < slices.end; first += chunks_to_score(program, &step->slices[s++]))
        if (s >= slices.begin && chunks_to_score(program, &step->slices[s]))
            choose(a, &step->slices[s], step->slices[s].first_row, program->index_scores + first * PW_CHUNK);
}

/* Rows one by one in turns, since later ones have more positions. */
static void index_rows(const indexing *a, pw_run *run, int member) {
    const pw_slice *slice = run->program->step.slices;
    const pw_step *step = &run->program->step;
    int64_t rows = pw_op_rows(run, a->op), threads = run->division->ranks == 1 ? run->threads : run->division->n_threads;
    for (int64_t i = pw_rows_of(run, threads, member).begin; i < rows; i += threads) {
        int64_t row = a->op->rows == PW_EVERY_ROW ? i : step->logit_rows[i], position = step->positions[row];
        if (!pw_has_choice(run->program, position)) continue;
        while (row >= slice->first_row + slice->n_rows) ++slice;
        pw_queries queries = load_row(a, row);
        for (int64_t chunk = 0; chunk <= position / PW_CHUNK; ++chunk)
            score_chunk(a, &queries, slice, position, chunk, a->scores + chunk * PW_CHUNK);
        choose(a, slice, row, a->scores);
    }
}

void pw_run_choose(pw_run *run, const pw_op *op, int member) {
    pw_program *program = run->program;
    const pw_step *step = &program->step;
    int64_t chunks = 0;
    indexing a = {.run = run, .op = op, .keys = pw_kv_head_of(program, op->layer, 0, 0)};
    carve(program, op, (float *)(program->scratch + member * program->scratch_bytes), &a);
    a.keys.values = (char *)a.keys.values + a.keys.head_dim * pw_kv_element_bytes(a.keys.format);
    a.keys.head_dim = program->shape.index;
    pw_range rows = pw_rows_of(run, step->n_tokens, member);
    for (int64_t row = rows.begin; row < rows.end; ++row) store_key(&a, row);
    if (!pw_meet(run, member)) return;
    for (int64_t s = 0; s < step->n_slices && step->split; ++s) chunks += chunks_to_score(program, &step->slices[s]);
    if (step->split && chunks <= program->partial_room) index_split(&a, run, chunks, member);
    else index_rows(&a, run, member);
}
