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
    int64_t source = op->rows == PW_GATHERED_ROWS ? program->step.logit_rows[row] : row;
    const float *x = program->arena + op->in + source * op->in_stride;
    if (op->source == PW_FROM_NORM) ops->rmsnorm(op->k, x, op->norm, program->shape.norm_eps, scratch);
    if (op->source == PW_FROM_GATE) ops->silu_gate(op->k, x, x + op->k, scratch);
    if (op->source != PW_FROM_ROWS) x = scratch;
    for (int i = 0; i < op->n_forms; ++i)
        run->kernels->gemm.prepare_rows(&op->forms[i], op->k, x, 0, (pw_range){row, row + 1}, prepared[i]);
}

/* An op's product with one of its weights. Gathered rows begin with what the product is added to. */
static pw_product product_of(const pw_run *run, const pw_op *op, const pw_part *part, int64_t rows,
                             const char *prepared) {
    const pw_program *program = run->program;
    pw_product p = {.weight = &part->weight, .rows = rows, .ldy = op->out_stride};
    p.x = (pw_activations){prepared, run->kernels->gemm.row_bytes(&op->forms[part->form], op->k)};
    p.y = program->arena + op->out + part->column;
    p.epilogue = (pw_epilogue)op->epilogue;
    if (op->rows == PW_GATHERED_ROWS && op->epilogue == PW_ADD) {
        p.base = program->arena + op->residual + part->column;
        p.base_stride = op->residual_stride;
        p.base_rows = program->step.logit_rows;
    }
    return p;
}

static void multiply_part(const pw_run *run, const pw_op *op, int index, int64_t rows, int member,
                          const char *prepared) {
    const pw_program *program = run->program;
    int room = program->capacity.max_threads;
    pw_product product = product_of(run, op, &op->parts[index], rows, prepared);
    pw_schedule schedule = pw_program_schedule_of(&op->parts[index], run->table, rows, run->threads);
    pw_crew crew = {.team = run->team, .threads = run->threads, .kernels = &run->kernels->gemm, .most_regions = room};
    crew.tickets = pw_region_tickets(program, op - program->ops) + index * room;
    crew.split = program->split[index];
    crew.split_floats = program->split_floats;
    pw_multiply(&product, &schedule, &crew, member);
}

/* One row is prepared by every member for itself, which is cheaper than a barrier; more rows are shared out. */
void pw_run_linear(const pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    int64_t rows = op->rows == PW_EVERY_ROW ? program->step.n_tokens : program->step.n_logit_rows;
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
        multiply_part(run, op, i, rows, member, prepared[op->parts[i].form]);
}
