/* Embedding lookups and linear layers of a program. */
#include <string.h>

#include "program/exact.h"
#include "program/linear.h"
#include "adapters/low_rank.h"

static pw_range member_rows(int64_t rows, int threads, int member) {
    return (pw_range){rows * member / threads, rows * (member + 1) / threads};
}

static void find_angles(const pw_program *program, int32_t index, int64_t row) {
    const pw_attention_kind *kind = &program->kinds[index];
    float *cosines = program->cosines[index] + row * kind->half, *sines = program->sines[index] + row * kind->half;
    for (int64_t i = 0; i < kind->half; ++i) {
        double cosine, sine;
        pw_cosine_sine((double)program->step.positions[row] * kind->inv_freq[i], &cosine, &sine);
        cosines[i] = (float)(kind->magnitude * cosine);
        sines[i] = (float)(kind->magnitude * sine);
    }
}

/* 1 for a row of the second text of a pair. `slice`: one that does not begin after the row. */
static int64_t segment_of(const pw_step *step, int64_t row, int64_t *slice) {
    while (row >= step->slices[*slice].first_row + step->slices[*slice].n_rows) ++*slice;
    return row - step->slices[*slice].first_row >= step->slices[*slice].second;
}

void pw_run_embed(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    const pw_step *step = &program->step;
    pw_range rows = pw_rows_of(run, step->n_tokens, member);
    int64_t slice = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float *x = program->arena + op->out + row * op->out_stride;
        run->kernels->gemm.unpack_row(&op->parts[0].weight, step->tokens[row], x);
        if (op->scale != 1.0f) run->kernels->ops.scale(op->k, op->scale, x);
        if (op->positions) run->kernels->ops.add(op->k, op->positions + step->positions[row] * op->k, x);
        if (op->segments) run->kernels->ops.add(op->k, op->segments + segment_of(step, row, &slice) * op->k, x);
        for (int32_t kind = 0; kind < program->n_kinds; ++kind)
            if (program->kinds[kind].angles == kind) find_angles(program, kind, row);
    }
}

void pw_run_layer_inputs(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    const pw_weight *table = &op->parts[0].weight;
    int64_t parts = op->k / table->k;
    pw_range rows = pw_rows_of(run, program->step.n_tokens, member);
    float *scratch = (float *)(program->scratch + member * program->scratch_bytes);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float *x = program->arena + op->out + row * op->out_stride;
        int64_t token = program->step.tokens[row], first = (token + 1) * parts <= table->n ? token * parts : 0;
        for (int64_t part = 0; part < parts; ++part)
            run->kernels->gemm.unpack_row(table, first + part, scratch + part * table->k);
        if (op->scale != 1.0f) run->kernels->ops.scale(op->k, op->scale, scratch);
        for (int64_t at = 0; at < op->k; at += op->group)
            run->kernels->ops.rmsnorm(op->group, x + at, op->norm, op->eps, x + at);
        run->kernels->ops.add(op->k, scratch, x);
    }
}

static void prepare_row(const pw_run *run, const pw_op *op, int64_t row, float *scratch, char *const *prepared) {
    const float *x = pw_op_input(run, op, row, scratch);
    if (op->tap) memcpy(op->tap + row * op->k, x, sizeof(float) * (size_t)op->k);
    const pw_preparation *preparation = &op->preparation;
    for (int32_t i = 0; i < preparation->count; ++i)
        run->kernels->gemm.prepare_rows(&preparation->forms[i], op->k, x, 0, (pw_range){row, row + 1}, prepared[i]);
}

/* An op's product with this rank's columns of a weight. Gathered rows begin with what the product is added to. */
static pw_product product_of(const pw_run *run, const pw_op *op, int index, int64_t rows, const char *prepared) {
    const pw_program *program = run->program;
    const pw_column_share *share = &op->shares[run->table][index];
    pw_product p = {.weight = &share->weight, .rows = rows, .ldy = op->out_stride};
    const pw_preparation *preparation = &op->preparation;
    const pw_form *form = &preparation->forms[preparation->form_of[index]];
    p.x = (pw_activations){prepared, run->kernels->gemm.row_bytes(form, op->k)};
    p.y = program->arena + op->out + share->column;
    p.epilogue = (pw_epilogue)op->epilogue;
    if (op->rows == PW_GATHERED_ROWS && op->epilogue == PW_ADD) {
        p.base = program->arena + op->residual + share->column;
        p.base_stride = op->residual_stride;
        p.base_rows = program->step.logit_rows;
    }
    return p;
}

/* `adapted`: rows that get low-rank products on top; NULL: none. */
static void multiply_part(const pw_run *run, const pw_op *op, const pw_adapted *adapted, int index, int64_t rows, int member,
                          const char *prepared) {
    const pw_program *program = run->program;
    const pw_column_share *share = &op->shares[run->table][index];
    if (share->weight.n == 0) return;
    int room = program->capacity.max_threads;
    pw_product product = product_of(run, op, index, rows, prepared);
    pw_low_rank_addition addition = {run, op, adapted, share->column};
    product.finish = adapted ? pw_add_low_rank : NULL;
    product.what = &addition;
    pw_schedule schedule = pw_schedule_for(&share->schedules, &share->weight, rows, run->threads);
    pw_crew crew = {.team = run->team, .threads = run->threads, .kernels = &run->kernels->gemm, .most_regions = room};
    crew.tickets = pw_region_tickets(program, op - program->ops) + index * room;
    crew.split = program->split[index];
    crew.split_floats = program->split_floats;
    pw_multiply(&product, &schedule, &crew, member);
}

/* Who prepares the rows that a member multiplies. */
typedef enum { BY_MEMBER, BY_RANK, BY_ALL_RANKS } preparation;

static preparation preparation_of(const pw_run *run, int64_t rows, bool for_all) {
    if (for_all) return run->division->ranks > 1 ? BY_ALL_RANKS : BY_RANK;
    if (rows == 1) return BY_MEMBER; /* cheaper than a barrier */
    return run->division->ranks > 1 && rows > PW_OWN_ROWS ? BY_ALL_RANKS : BY_RANK;
}

static char *prepared_rows(const pw_run *run, preparation by, char *scratch, int form) {
    const pw_program *program = run->program;
    if (by == BY_MEMBER) return scratch + form * program->private_row_bytes;
    return by == BY_RANK && run->division->ranks > 1 ? program->own_prepared[form] : program->prepared[form];
}

static pw_range rows_to_prepare(const pw_run *run, preparation by, int64_t rows, int member) {
    if (by == BY_MEMBER) return (pw_range){0, 1};
    return by == BY_RANK ? member_rows(rows, run->threads, member) : pw_rows_of(run, rows, member);
}

void pw_run_linear(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    int64_t rows = pw_op_rows(run, op);
    if (rows == 0) return;
    char *scratch = program->scratch + member * program->scratch_bytes;
    float *row_scratch = (float *)(scratch + PW_MAX_PARTS * program->private_row_bytes);
    const pw_adapted *adapted = pw_adapted_rows(program, op);
    preparation by = preparation_of(run, rows, adapted != NULL);
    char *prepared[PW_MAX_PARTS];
    for (int i = 0; i < PW_MAX_PARTS; ++i) prepared[i] = prepared_rows(run, by, scratch, i);
    pw_range own = rows_to_prepare(run, by, rows, member);
    for (int64_t row = own.begin; row < own.end; ++row) prepare_row(run, op, row, row_scratch, prepared);
    if (adapted) pw_run_low_rank_down(run, op, adapted, own, member);
    if (by == BY_RANK) pw_team_barrier(run->team, member);
    if (by == BY_ALL_RANKS && !pw_meet(run, member)) return;
    for (int i = 0; i < op->n_parts; ++i)
        multiply_part(run, op, adapted, i, rows, member, prepared[op->preparation.form_of[i]]);
}
