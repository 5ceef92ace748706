#include "state/streams.h"

#include <math.h>
#include <string.h>

#define LEAST_SQUARE 1e-5

typedef struct {
    float *first; /* of a row's streams */
    int64_t each;
} row_of_streams;

static float *stream_of(row_of_streams row, int64_t index) { return row.first + index * row.each; }

/* Four chains of sums, whatever vectors a machine has. */
static double dot(int64_t n, const float *x, const float *y) {
    double sums[4] = {0};
    for (int64_t i = 0; i < n; ++i) sums[i % 4] += (double)x[i] * (double)y[i];
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

static double mean_square(int64_t n, const float *x) { return dot(n, x, x) / (double)n; }

/* m of a row, and a matrix [outputs][count] times it. */
static void find_coefficients(const pw_run *run, const pw_op *op, const float *x, int32_t outputs, float *scratch,
                              float *found) {
    const pw_streams *s = &op->streams;
    float m[PW_MAX_STREAMS];
    run->kernels->ops.rmsnorm(op->k, x, op->norm, op->eps, scratch);
    for (int32_t i = 0; i < s->count; ++i) m[i] = (float)dot(op->k, s->router + i * op->k, scratch);
    run->kernels->ops.cap(s->count, 1.0f, m, m);
    for (int32_t i = 0; i < outputs; ++i) found[i] = (float)dot(s->count, s->coefficients + i * s->count, m);
}

static void predict(const pw_run *run, const pw_op *op, row_of_streams streams, float *out, float *scratch) {
    const pw_streams *s = &op->streams;
    float c[PW_MAX_STREAMS * PW_MAX_STREAMS], old[PW_MAX_STREAMS];
    find_coefficients(run, op, stream_of(streams, s->active), s->count * s->count, scratch, c);
    for (int64_t i = 0; i < op->k; ++i) {
        for (int32_t j = 0; j < s->count; ++j) old[j] = stream_of(streams, j)[i];
        for (int32_t j = 0; j < s->count; ++j) {
            float sum = old[j];
            for (int32_t k = 0; k < s->count; ++k) sum = fmaf(c[j * s->count + k], old[k], sum);
            stream_of(streams, j)[i] = sum;
        }
    }
    memcpy(out, stream_of(streams, s->active), sizeof(float) * (size_t)op->k);
}

static void correct(const pw_run *run, const pw_op *op, row_of_streams from, row_of_streams to, const float *x,
                    float *out, float *scratch) {
    const pw_streams *s = &op->streams;
    float c[PW_MAX_STREAMS];
    find_coefficients(run, op, x, s->count, scratch, c);
    for (int64_t i = 0; i < op->k; ++i) {
        float gained = x[i] - stream_of(from, s->active)[i];
        for (int32_t j = 0; j < s->count; ++j)
            stream_of(to, j)[i] = fmaf(1.0f + c[j], gained, stream_of(from, j)[i]);
        float active = stream_of(to, s->active)[i];
        out[i] = s->scale ? active * s->scale[i] : active;
    }
}

/* The factor that gives x the length of a row whose mean square it is. */
static float to_length(int64_t n, double square, const float *x) {
    double own = mean_square(n, x);
    return (float)sqrt(square / (own > LEAST_SQUARE ? own : LEAST_SQUARE));
}

static void spread(const pw_run *run, const pw_op *op, row_of_streams streams, const float *x) {
    double square = mean_square(op->k, x);
    memcpy(streams.first, x, sizeof(float) * (size_t)op->k);
    for (int32_t j = 1; j < op->streams.count; ++j)
        run->kernels->ops.scale(op->k, to_length(op->k, square, stream_of(streams, j)), stream_of(streams, j));
}

static void merge(const pw_op *op, row_of_streams streams, row_of_streams others, float *out) {
    int32_t count = op->streams.count;
    double square = mean_square(op->k, streams.first);
    memcpy(out, streams.first, sizeof(float) * (size_t)op->k);
    for (int32_t j = 1; j < count; ++j) {
        const float *x = stream_of(others, j - 1);
        float factor = to_length(op->k, square, x);
        for (int64_t i = 0; i < op->k; ++i) out[i] = fmaf(factor, x[i], out[i]);
    }
    for (int64_t i = 0; i < op->k; ++i) out[i] /= (float)count;
}

void pw_run_streams(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    const pw_streams *s = &op->streams;
    bool every = op->rows == PW_EVERY_ROW;
    float *scratch = (float *)(program->scratch + member * program->scratch_bytes), *arena = program->arena;
    pw_range own = pw_rows_of(run, pw_op_rows(run, op), member);
    for (int64_t row = own.begin; row < own.end; ++row) {
        int64_t of_step = every || s->mode == PW_MERGE ? row : program->step.logit_rows[row];
        row_of_streams from = {arena + s->at + of_step * s->stride, s->each};
        row_of_streams to = {arena + s->to + row * s->to_stride, s->each};
        const float *x = arena + op->in + row * op->in_stride;
        float *out = arena + op->out + row * op->out_stride;
        if (s->mode == PW_PREDICT) predict(run, op, from, out, scratch);
        if (s->mode == PW_CORRECT) correct(run, op, from, to, x, out, scratch);
        if (s->mode == PW_SPREAD) spread(run, op, from, x);
        if (s->mode == PW_MERGE) merge(op, from, to, out);
    }
}
