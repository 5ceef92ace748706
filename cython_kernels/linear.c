/* Embedding lookups and linear layers of a program. */
#include <math.h>
#include <string.h>

#include "program.h"

enum { STREAMED_ROWS = 8, PIECES_PER_THREAD = 6 };

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

/* A product's rows x panels in pieces, `rows` and `panels` of them, the last ones smaller. */
typedef struct {
    int64_t rows, panels;           /* of a piece */
    int64_t row_pieces, panel_pieces;
} cut;

/* Some pieces for every thread, so that one that is held up does not hold up all; whole tiles of whole row blocks. */
static cut cut_product(const pw_schedule *schedule, int64_t rows, int64_t panels, int threads) {
    cut c = {.rows = schedule->block_m > 0 ? schedule->block_m : rows};
    int64_t unit = schedule->panels > 0 ? schedule->panels : 1;
    c.row_pieces = (rows + c.rows - 1) / c.rows;
    int64_t fair = panels * c.row_pieces / (PIECES_PER_THREAD * threads);
    c.panels = (fair + unit - 1) / unit * unit;
    if (c.panels < unit) c.panels = unit;
    c.panel_pieces = (panels + c.panels - 1) / c.panels;
    return c;
}

static pw_range piece(int64_t index, int64_t size, int64_t end) {
    return (pw_range){index * size, (index + 1) * size < end ? (index + 1) * size : end};
}

typedef struct {
    const pw_run *run;
    const pw_op *op;
    const pw_part *part;
    pw_schedule schedule;
    pw_activations x;
} product;

/* Gathered rows begin with what the product is added to. */
static void gather_residual(const product *p, pw_range rows, pw_range panels) {
    const pw_program *program = p->run->program;
    int64_t begin = panels.begin * PW_PANEL, end = panels.end * PW_PANEL;
    if (end > p->part->weight.n) end = p->part->weight.n;
    if (begin >= end) return;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        int64_t from = p->op->residual + program->step.logit_rows[row] * p->op->residual_stride;
        int64_t to = p->op->out + row * p->op->out_stride;
        memcpy(program->arena + to + p->part->column + begin, program->arena + from + p->part->column + begin,
               sizeof(float) * (size_t)(end - begin));
    }
}

static void multiply(const product *p, pw_range rows, pw_range panels) {
    const pw_op *op = p->op;
    if (op->rows == PW_GATHERED_ROWS && op->epilogue == PW_ADD) gather_residual(p, rows, panels);
    p->run->kernels->gemm.gemm(&p->part->weight, &p->x, rows, panels, -1,
                               p->run->program->arena + op->out + p->part->column, op->out_stride,
                               (pw_epilogue)op->epilogue, &p->schedule);
}

/* Few rows stream the weights: each member has its fixed share of them. Many rows are cut into pieces, and whoever
 * is free takes the next; results do not depend on the cut (gemm.h). */
static void multiply_part(const pw_run *run, const pw_op *op, int part_index, int64_t rows, int member,
                          const char *prepared) {
    const pw_part *part = &op->parts[part_index];
    const pw_weight *w = &part->weight;
    product p = {run, op, part, pw_default_schedule(w, rows, run->threads),
                 {prepared, run->kernels->gemm.row_bytes(&op->forms[part->form], op->k)}};
    if (rows <= STREAMED_ROWS || run->threads == 1) {
        pw_range share, panels;
        pw_share(&p.schedule, w, rows, member, &share, &panels);
        multiply(&p, share, panels);
        return;
    }
    cut c = cut_product(&p.schedule, rows, pw_panels(w->n), run->threads);
    atomic_long *next = &run->program->tickets[(op - run->program->ops) * PW_MAX_PARTS + part_index].next;
    for (;;) {
        int64_t ticket = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
        if (ticket >= c.row_pieces * c.panel_pieces) return;
        multiply(&p, piece(ticket % c.row_pieces, c.rows, rows),
                 piece(ticket / c.row_pieces, c.panels, pw_panels(w->n)));
    }
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
