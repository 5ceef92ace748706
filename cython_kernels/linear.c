/* Embedding lookups and linear layers of a program. */
#include <math.h>

#include "program.h"

static pw_range member_rows(int64_t rows, int threads, int member) {
    return (pw_range){rows * member / threads, rows * (member + 1) / threads};
}

void pw_run_embed(const pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    const pw_step *step = &program->step;
    int64_t half = program->shape.head_dim / 2;
    pw_range rows = member_rows(step->n_tokens, run->threads, member);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float *x = program->arena + op->out + row * op->out_stride;
        run->kernels->gemm.unpack_row(&op->parts[0].weight, step->tokens[row], x);
        float *cosines = program->cosines + row * half, *sines = program->sines + row * half;
        for (int64_t i = 0; i < half; ++i) {
            double angle = (double)step->positions[row] * program->inv_freq[i];
            cosines[i] = (float)cos(angle);
            sines[i] = (float)sin(angle);
        }
    }
}

static void prepare_row(const pw_run *run, const pw_op *op, int64_t row, float *scratch, char *const *prepared) {
    const pw_program *program = run->program;
    const pw_op_kernels *ops = &run->kernels->ops;
    int64_t source = op->logit_rows ? program->step.logit_rows[row] : row;
    const float *x = program->arena + op->in + source * op->in_stride;
    if (op->source == PW_FROM_NORM) ops->rmsnorm(op->k, x, op->norm, program->shape.norm_eps, scratch);
    if (op->source == PW_FROM_GATE) ops->silu_gate(op->k, x, x + op->k, scratch);
    if (op->source != PW_FROM_ROWS) x = scratch;
    for (int i = 0; i < op->n_forms; ++i)
        run->kernels->gemm.prepare_rows(&op->forms[i], op->k, x, 0, (pw_range){row, row + 1}, prepared[i]);
}

static void multiply_part(const pw_run *run, const pw_op *op, const pw_part *part, int64_t rows, int member,
                          const char *prepared) {
    const pw_gemm_kernels *gemm = &run->kernels->gemm;
    const pw_form *form = &op->forms[part->form];
    pw_activations x = {prepared, gemm->row_bytes(form, op->k)};
    pw_schedule schedule = pw_default_schedule(&part->weight, rows, run->threads);
    pw_range share, panels;
    pw_share(&schedule, &part->weight, rows, member, &share, &panels);
    gemm->gemm(&part->weight, &x, share, panels, run->program->arena + op->out + part->column, op->out_stride,
               (pw_epilogue)op->epilogue, &schedule);
}

/* One row is prepared by every member for itself, which is cheaper than a barrier; more rows are shared out. */
void pw_run_linear(const pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    int64_t rows = op->logit_rows ? program->step.n_logit_rows : program->step.n_tokens;
    if (rows == 0) return;
    char *scratch = program->scratch + member * program->scratch_bytes;
    char *prepared[PW_MAX_PARTS];
    bool alone = rows == 1;
    for (int i = 0; i < PW_MAX_PARTS; ++i)
        prepared[i] = alone ? scratch + i * program->private_row_bytes : program->prepared[i];
    float *row_scratch = (float *)(scratch + PW_MAX_PARTS * program->private_row_bytes);
    pw_range own = alone ? (pw_range){0, 1} : member_rows(rows, run->threads, member);
    for (int64_t row = own.begin; row < own.end; ++row) prepare_row(run, op, row, row_scratch, prepared);
    if (!alone) pw_team_barrier(run->team, member);
    for (int i = 0; i < op->n_parts; ++i)
        multiply_part(run, op, &op->parts[i], rows, member, prepared[op->parts[i].form]);
}
