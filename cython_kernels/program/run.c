#include "program/run.h"

#include <math.h>

pw_range pw_rows_of(const pw_run *run, int64_t rows, int member) {
    bool alone = run->division->ranks == 1;
    int64_t threads = alone ? run->threads : run->division->n_threads;
    int64_t thread = alone ? member : run->division->first_thread + member;
    return (pw_range){rows * thread / threads, rows * (thread + 1) / threads};
}

void pw_turn_row(const pw_run *run, const pw_op *op, int64_t row, float factor, const float *x, float *out) {
    const pw_program *program = run->program;
    const pw_attention_kind *kind = &program->kinds[op->kind];
    int64_t at = row * kind->half;
    pw_turn turn = {program->cosines[kind->angles] + at, program->sines[kind->angles] + at, factor};
    run->kernels->ops.rope(kind->half, &turn, x, out);
}

/* Run by the last member of a team to arrive. A rank that gives up a step fails the group, and so ends it for all. */
static void meet_ranks(void *context) {
    pw_run *run = context;
    const pw_program *program = run->program;
    int status = pw_group_barrier(program->group, program->rank, run->division->ranks, program->patience_ns);
    if (status == PW_GROUP_OK) return;
    pw_group_fail(program->group);
    atomic_store_explicit(&run->status, status == PW_GROUP_LATE ? PW_RUN_LATE : PW_RUN_GROUP_FAILED,
                          memory_order_relaxed);
}

/* The status changes only while every member waits, so that all of them leave at the same barrier. */
bool pw_meet(pw_run *run, int member) {
    if (run->division->ranks == 1) {
        pw_team_barrier(run->team, member);
        return true;
    }
    pw_team_barrier_beyond(run->team, member, meet_ranks, run);
    return atomic_load_explicit(&run->status, memory_order_relaxed) == PW_TEAM_OK;
}

/* First halves less their mean and so many deviations, or 0 where that is negative. */
static const float *above_most(const pw_op *op, const float *x, float *out) {
    double sums[4] = {0}, squares[4] = {0}, n = (double)op->k;
    for (int64_t i = 0; i < op->k; ++i) sums[i % 4] += (double)x[i];
    double mean = (sums[0] + sums[1] + (sums[2] + sums[3])) / n;
    for (int64_t i = 0; i < op->k; ++i) squares[i % 4] += ((double)x[i] - mean) * ((double)x[i] - mean);
    double deviation = sqrt((squares[0] + squares[1] + (squares[2] + squares[3])) / n);
    float least = (float)(mean + (double)op->sparsity * deviation);
    for (int64_t i = 0; i < op->k; ++i) out[i] = x[i] > least ? x[i] - least : 0.0f;
    return out;
}

static const float *second_half(const pw_program *program, const pw_op *op, int64_t row, const float *x) {
    if (!op->with_stride) return x + op->k;
    int64_t of_step = op->rows == PW_EVERY_ROW ? row : program->step.logit_rows[row];
    return program->arena + op->with + of_step * op->with_stride;
}

const float *pw_op_input(const pw_run *run, const pw_op *op, int64_t row, float *scratch) {
    const pw_program *program = run->program;
    const pw_op_kernels *ops = &run->kernels->ops;
    int64_t source = op->rows == PW_GATHERED_ROWS ? program->step.logit_rows[row] : row;
    const float *x = program->arena + op->in + source * op->in_stride, *second = second_half(program, op, row, x);
    if (op->source == PW_FROM_NORM) ops->rmsnorm(op->k, x, op->norm, op->eps, scratch);
    if (op->source == PW_FROM_GATE && op->sparsity != 0.0f) x = above_most(op, x, scratch);
    if (op->source == PW_FROM_GATE) ops->gates[op->gate](op->k, x, second, scratch);
    if (op->source == PW_FROM_ACTIVATION) ops->activations[op->gate](op->k, x, op->bias, scratch);
    return op->source == PW_FROM_ROWS ? x : scratch;
}
