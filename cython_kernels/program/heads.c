/* Products by head: numbers of a head times a weight of its own. Ranks divide the heads. */
#include "program/linear.h"

enum { PIECES_PER_THREAD = 6 };

/* Prepared rows lie head by head. */
static void prepare(const pw_run *run, const pw_op *op, pw_range heads, int64_t rows, int64_t bytes, int member) {
    const pw_program *program = run->program;
    const pw_form *form = &op->preparation.forms[0];
    int64_t count = heads.end - heads.begin, all = rows * count;
    for (int64_t i = all * member / run->threads; i < all * (member + 1) / run->threads; ++i) {
        int64_t row = i / count, head = heads.begin + i % count;
        const float *x = program->arena + op->in + row * op->in_stride + head * op->heads.step;
        char *own = program->prepared[0] + (head * rows + row) * bytes;
        run->kernels->gemm.prepare_rows(form, op->k, x, 0, (pw_range){0, 1}, own);
    }
}

/* All rows of a head times some panels of its weight. */
static void multiply(const pw_run *run, const pw_op *op, int64_t head, pw_range panels, int64_t rows, int64_t bytes) {
    const pw_program *program = run->program;
    const pw_column_share *share = &op->shares[run->table][0];
    int64_t before = head * pw_panels(op->heads.n);
    pw_activations x = {program->prepared[0] + head * rows * bytes, bytes};
    pw_schedule schedule = pw_schedule_for(&share->schedules, &share->weight, rows, 1);
    float *y = program->arena + op->out + head * op->heads.n - before * PW_PANEL;
    pw_range all = {0, rows}, own = {before + panels.begin, before + panels.end};
    pw_weight stack = op->parts[0].weight;
    run->kernels->gemm.gemm(&stack, &x, all, own, -1, y, op->out_stride, PW_STORE, &schedule);
}

void pw_run_heads(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    int64_t rows = program->step.n_tokens;
    int64_t bytes = run->kernels->gemm.row_bytes(&op->preparation.forms[0], op->k);
    pw_range heads = pw_share_of(run->division, op->heads.count);
    int64_t count = heads.end - heads.begin;
    prepare(run, op, heads, rows, bytes, member);
    pw_team_barrier(run->team, member);
    int64_t panels = pw_panels(op->heads.n), each = panels * count / (PIECES_PER_THREAD * (int64_t)run->threads);
    each = each < 1 ? 1 : each > panels ? panels : each;
    int64_t of_one = (panels + each - 1) / each;
    atomic_long *next = &program->tickets[(op - program->ops) * PW_MAX_PARTS].next;
    for (int64_t i; (i = atomic_fetch_add_explicit(next, 1, memory_order_relaxed)) < of_one * count;) {
        int64_t begin = i % of_one * each, end = begin + each < panels ? begin + each : panels;
        multiply(run, op, heads.begin + i / of_one, (pw_range){begin, end}, rows, bytes);
    }
}
