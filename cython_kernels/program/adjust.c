/* Rows of a program that are changed one by one, without a product. */
#include "program/linear.h"

#include <string.h>

/* out = LayerNorm(in + bias); `in` may be `out`. */
static void centre_row(const pw_run *run, const pw_op *op, int64_t row) {
    float *arena = run->program->arena;
    const pw_norm norm = {op->norm, op->norm_bias, op->eps};
    run->kernels->ops.layernorm(op->k, arena + op->in + row * op->in_stride, op->bias, &norm,
                                arena + op->out + row * op->out_stride);
}

/* out = scale ([base +] cap(norm(in) + bias)), as far as the op has them; `in` may be `out`. */
static void adjust_row(const pw_run *run, const pw_op *op, int64_t row, float *scratch) {
    const pw_program *program = run->program;
    const pw_op_kernels *ops = &run->kernels->ops;
    const float *x = program->arena + op->in + row * op->in_stride;
    float *out = program->arena + op->out + row * op->out_stride, *y = op->epilogue == PW_ADD ? scratch : out;
    if (op->norm) ops->rmsnorm(op->k, x, op->norm, op->eps, y);
    else if (x != y) memcpy(y, x, sizeof(float) * (size_t)op->k);
    if (op->bias) ops->add(op->k, op->bias, y);
    if (op->cap > 0) ops->cap(op->k, op->cap, y, y);
    if (op->epilogue == PW_ADD && op->rows == PW_GATHERED_ROWS) {
        int64_t source = program->step.logit_rows[row];
        memcpy(out, program->arena + op->residual + source * op->residual_stride, sizeof(float) * (size_t)op->k);
    }
    if (op->epilogue == PW_ADD) ops->add(op->k, y, out);
    if (op->scale != 1.0f) ops->scale(op->k, op->scale, out);
}

void pw_run_adjust(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    float *scratch = (float *)(program->scratch + member * program->scratch_bytes);
    pw_range own = pw_rows_of(run, pw_op_rows(run, op), member);
    for (int64_t row = own.begin; row < own.end; ++row) {
        if (op->norm_bias) centre_row(run, op, row);
        else adjust_row(run, op, row, scratch);
    }
}
