#include "state/run_state.h"

#include <string.h>

#include "program/exact.h"

enum { MAX_TAPS = 16 };

static const char *take_place(pw_program *program, int64_t place) {
    if (place < 0 || place >= program->capacity.state_places) return "a state has no place";
    if (program->step.is_state_taken[place]) return "two states share a place";
    program->step.is_state_taken[place] = true;
    return NULL;
}

static const char *check_keeps(pw_program *program, const pw_slice *slice) {
    const pw_step *step = &program->step;
    int64_t room = program->capacity.max_tokens, before = 0;
    if (slice->n_keeps < 0 || slice->n_keeps > room || slice->first_keep < 0 || slice->first_keep > room - slice->n_keeps)
        return "copies of a state lie outside the step";
    for (int64_t i = 0; i < slice->n_keeps; ++i) {
        const pw_keep *keep = &step->keeps[slice->first_keep + i];
        if (keep->n_rows <= before || keep->n_rows > slice->n_rows) return "a state is kept after a row that is not there";
        const char *problem = take_place(program, keep->place);
        if (problem) return problem;
        before = keep->n_rows;
    }
    return NULL;
}

const char *pw_check_states(pw_program *program) {
    const pw_step *step = &program->step;
    memset(step->is_state_taken, 0, sizeof *step->is_state_taken * (size_t)program->capacity.state_places);
    for (int64_t s = 0; s < step->n_slices; ++s) {
        const char *problem = take_place(program, step->slices[s].state);
        if (!problem) problem = check_keeps(program, &step->slices[s]);
        if (problem) return problem;
    }
    return NULL;
}

static float *state_of(const pw_program *program, const pw_op *op, int64_t place) {
    return program->states + place * program->state_floats + op->state.at;
}

/* ---- convolutions ----------------------------------------------------------------------------------------------- */

/* Some channels of a slice: its inputs, which the rows of the state come before. */
typedef struct {
    const float *first;
    int64_t stride;
    float *window;
    int64_t window_stride, taps, n;
} channels;

/* The input that stands `ahead` rows after the oldest of the state. */
static const float *input(const channels *c, int64_t ahead) {
    int64_t row = ahead - (c->taps - 1);
    return row < 0 ? c->window + ahead * c->window_stride : c->first + row * c->stride;
}

/* The state after `n_rows` rows, which may take the place of the one before. */
static void keep_window(const channels *c, int64_t n_rows, float *target) {
    for (int64_t i = 0; i < c->taps - 1; ++i)
        memmove(target + i * c->window_stride, input(c, n_rows + i), sizeof(float) * (size_t)c->n);
}

static void convolve_slice(const pw_run *run, const pw_op *op, const pw_slice *slice, pw_range own) {
    const pw_program *program = run->program;
    const pw_op_kernels *ops = &run->kernels->ops;
    float *in = program->arena + op->in + slice->first_row * op->in_stride + own.begin;
    float *x = op->state.gates_rows ? in + 2 * op->k : in;
    channels c = {x, op->in_stride, state_of(program, op, slice->state) + own.begin, op->k, op->state.taps,
                  own.end - own.begin};
    if (slice->start == 0)
        for (int64_t i = 0; i < c.taps - 1; ++i) memset(c.window + i * op->k, 0, sizeof(float) * (size_t)c.n);
    const float *rows[MAX_TAPS];
    pw_convolution row = {.rows = rows, .weights = op->state.weights + own.begin, .weights_stride = op->k,
                          .bias = op->bias ? op->bias + own.begin : NULL, .taps = op->state.taps, .silu = op->state.silu};
    for (int64_t r = 0; r < slice->n_rows; ++r) {
        if (op->state.gates_rows) {
            ops->multiply(c.n, in + r * op->in_stride, x + r * op->in_stride);
            row.gate = in + op->k + r * op->in_stride;
        }
        for (int64_t t = 0; t < c.taps; ++t) rows[t] = input(&c, r + t);
        row.y = program->arena + op->out + (slice->first_row + r) * op->out_stride + own.begin;
        ops->convolve(c.n, &row);
    }
    for (int64_t i = 0; i < slice->n_keeps; ++i) {
        const pw_keep *keep = &program->step.keeps[slice->first_keep + i];
        keep_window(&c, keep->n_rows, state_of(program, op, keep->place) + own.begin);
    }
    keep_window(&c, slice->n_rows, c.window);
}

void pw_run_convolve(pw_run *run, const pw_op *op, int member) {
    const pw_step *step = &run->program->step;
    pw_range own = pw_rows_of(run, (op->k + 15) / 16, member);
    own.begin *= 16;
    own.end = own.end * 16 < op->k ? own.end * 16 : op->k;
    if (own.begin >= own.end) return;
    for (int64_t s = 0; s < step->n_slices; ++s) convolve_slice(run, op, &step->slices[s], own);
}

/* ---- gates ------------------------------------------------------------------------------------------------------ */

static double time_step(const pw_state_op *own, float in, float offset) {
    double t = pw_softplus((double)in + (double)offset);
    if (t < (double)own->least) t = (double)own->least;
    return t > (double)own->most ? (double)own->most : t;
}

static void gates_of_row(const pw_op *op, const float *in, float *out) {
    const pw_state_op *own = &op->state;
    const float *of_time = own->erases ? in + own->heads : in;
    for (int32_t h = 0; h < own->heads; ++h) {
        double t = time_step(own, of_time[h], own->offsets[h]);
        out[h] = (float)pw_exponential((double)own->rates[h] * t);
        out[own->heads + h] = (float)(own->erases ? pw_logistic((double)in[h]) : t);
    }
}

static void gates_by_key(const pw_op *op, const float *in, float *out) {
    const pw_state_op *own = &op->state;
    int64_t keys = (int64_t)own->heads * own->key_dim;
    for (int64_t i = 0; i < keys; ++i) {
        double t = time_step(own, in[i], own->offsets[i]);
        out[i] = (float)pw_exponential((double)own->rates[i / own->key_dim] * t);
    }
    for (int32_t h = 0; h < own->heads; ++h) {
        out[keys + h] = 1.0f; /* the head's own, for which those of its key stand */
        out[keys + own->heads + h] = (float)pw_logistic((double)in[own->factor_at + h]);
    }
}

void pw_run_state_gates(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    const pw_state_op *own = &op->state;
    pw_range rows = pw_rows_of(run, program->step.n_tokens, member);
    float eps = op->eps / (float)own->key_dim; /* of a mean, as a norm's */
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float *in = program->arena + op->in + row * op->in_stride;
        float *out = program->arena + op->out + row * op->out_stride;
        if (own->by_key) gates_by_key(op, in, out);
        else gates_of_row(op, in, out);
        float *second = program->arena + own->second + row * own->second_stride;
        if (!own->query_scale) continue;
        for (int32_t g = 0; g < own->groups; ++g) {
            float *query = second + own->query_at + g * own->key_dim, *key = second + own->key_at + g * own->key_dim;
            run->kernels->ops.rmsnorm(own->key_dim, query, own->query_scale, eps, query);
            run->kernels->ops.rmsnorm(own->key_dim, key, own->key_scale, eps, key);
        }
    }
}

/* ---- the recurrence --------------------------------------------------------------------------------------------- */

static void recur_slice(const pw_run *run, const pw_op *op, const pw_slice *slice, int64_t head, int64_t block) {
    const pw_program *program = run->program;
    const pw_state_op *own = &op->state;
    int64_t floats = own->key_dim * 16, part = (head * pw_state_blocks(op) + block) * floats, done = 0;
    int64_t group = own->tiled ? head % own->groups : head / (own->heads / own->groups);
    int64_t column = head * own->value_dim + block * 16, decay = head + (own->by_key ? own->heads * own->key_dim : 0);
    float *state = state_of(program, op, slice->state) + part;
    if (slice->start == 0) memset(state, 0, sizeof(float) * (size_t)floats);
    pw_recurrence r = {.state = state, .stride = op->in_stride, .gates_stride = own->second_stride,
                       .factor_at = own->heads, .out_stride = op->out_stride, .key_dim = own->key_dim,
                       .skip = own->skips ? own->skips[head] : 0.0f, .erases = own->erases};
    const float *gates = program->arena + own->second + slice->first_row * own->second_stride;
    r.columns = own->value_dim - (int32_t)block * 16 < 16 ? own->value_dim - (int32_t)block * 16 : 16;
    for (int64_t i = 0; i <= slice->n_keeps; ++i) {
        const pw_keep *keep = i < slice->n_keeps ? &program->step.keeps[slice->first_keep + i] : NULL;
        int64_t row = slice->first_row + done;
        const float *in = program->arena + op->in + row * op->in_stride;
        r.query = in + own->query_at + group * own->key_dim;
        r.key = in + own->key_at + group * own->key_dim;
        r.value = in + own->value_at + column;
        r.gates = gates + done * own->second_stride + decay;
        r.decays = own->by_key ? gates + done * own->second_stride + head * own->key_dim : NULL;
        r.out = program->arena + op->out + row * op->out_stride + column;
        r.n_rows = (keep ? keep->n_rows : slice->n_rows) - done;
        run->kernels->ops.recur(&r);
        done += r.n_rows;
        if (keep) memcpy(state_of(program, op, keep->place) + part, state, sizeof(float) * (size_t)floats);
    }
}

void pw_run_recur(pw_run *run, const pw_op *op, int member) {
    const pw_step *step = &run->program->step;
    int64_t blocks = pw_state_blocks(op);
    pw_range own = pw_rows_of(run, op->state.heads * blocks, member);
    for (int64_t unit = own.begin; unit < own.end; ++unit)
        for (int64_t s = 0; s < step->n_slices; ++s)
            recur_slice(run, op, &step->slices[s], unit / blocks, unit % blocks);
}

/* ---- what is read of it ----------------------------------------------------------------------------------------- */

static void gate_row(const pw_run *run, const pw_op *op, int64_t row, float *scratch) {
    const pw_program *program = run->program;
    const pw_op_kernels *ops = &run->kernels->ops;
    const pw_state_op *own = &op->state;
    const float *x = program->arena + op->in + row * op->in_stride;
    const float *gate = program->arena + own->second + row * own->second_stride;
    float *out = program->arena + op->out + row * op->out_stride;
    if (own->one_gate) {
        if (x != out) memcpy(out, x, sizeof(float) * (size_t)op->k);
        ops->scale(op->k, (float)pw_logistic((double)gate[0]), out);
    } else if (!own->weights) {
        ops->gates[op->gate](op->k, gate, x, out);
        if (op->scale != 1.0f) ops->scale(op->k, op->scale, out);
    } else if (own->norm_first) {
        for (int32_t h = 0; h < own->heads; ++h)
            ops->rmsnorm(own->value_dim, x + h * own->value_dim, own->weights, op->eps, scratch + h * own->value_dim);
        ops->gates[op->gate](op->k, gate, scratch, out);
    } else {
        int64_t width = op->k / own->groups;
        ops->gates[op->gate](op->k, gate, x, scratch);
        for (int32_t g = 0; g < own->groups; ++g)
            ops->rmsnorm(width, scratch + g * width, own->weights + g * width, op->eps, out + g * width);
    }
}

void pw_run_gate_rows(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    float *scratch = (float *)(program->scratch + member * program->scratch_bytes);
    pw_range rows = pw_rows_of(run, pw_op_rows(run, op), member);
    for (int64_t row = rows.begin; row < rows.end; ++row) gate_row(run, op, row, scratch);
}
