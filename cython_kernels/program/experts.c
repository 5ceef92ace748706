#include "program/experts.h"

#include <math.h>
#include <string.h>

#include "program/exact.h"

enum { PIECES_PER_THREAD = 6 };

/* ---- routes ----------------------------------------------------------------------------------------------------- */

/* The largest number that is not chosen yet, the lowest of equals; some expert even where all are NaN. */
static int32_t next_chosen(const double *numbers, int32_t count, const int32_t *chosen, int32_t n_chosen) {
    int32_t best = -1;
    for (int32_t e = 0; e < count; ++e) {
        bool taken = false;
        for (int32_t i = 0; i < n_chosen; ++i) taken |= chosen[i] == e;
        if (!taken && (best < 0 || numbers[e] > numbers[best])) best = e;
    }
    return best;
}

static double sum_of_all(const pw_experts *experts, const float *logits, double top) {
    double total = 0;
    for (int32_t e = 0; e < experts->count; ++e) total += pw_exponential((double)logits[e] - top);
    return total;
}

static double largest_of(const float *logits, int32_t count) {
    double top = logits[0];
    for (int32_t e = 1; e < count; ++e) top = logits[e] > top ? logits[e] : top;
    return top;
}

/* What experts are chosen by: scores with their biases, or logits where those have the order of scores. */
static void find_numbers(const pw_op *op, const float *logits, double *numbers) {
    const pw_choice *choice = &op->choice;
    int32_t count = op->experts.count;
    bool needs_scores = choice->bias || choice->group_best > 1;
    double top = largest_of(logits, count), total = needs_scores ? sum_of_all(&op->experts, logits, top) : 1;
    for (int32_t e = 0; e < count; ++e) {
        numbers[e] = logits[e];
        if (needs_scores && choice->scores == PW_LOGISTIC) numbers[e] = pw_logistic(logits[e]);
        else if (needs_scores) numbers[e] = pw_exponential((double)logits[e] - top) / total;
        if (choice->bias) numbers[e] += choice->bias[e];
    }
}

/* Of groups that are not among the best, no expert is chosen. */
static void leave_groups_out(const pw_op *op, double *numbers) {
    const pw_choice *choice = &op->choice;
    int32_t of_one = op->experts.count / choice->groups, best[PW_MAX_EXPERTS];
    double worth[PW_MAX_EXPERTS];
    for (int32_t g = 0; g < choice->groups; ++g) {
        const double *own = numbers + g * of_one;
        worth[g] = 0;
        for (int32_t i = 0; i < choice->group_best; ++i) {
            best[i] = next_chosen(own, of_one, best, i);
            worth[g] += own[best[i]];
        }
    }
    for (int32_t i = 0; i < choice->chosen_groups; ++i) best[i] = next_chosen(worth, choice->groups, best, i);
    for (int32_t g = 0; g < choice->groups; ++g) {
        bool among = false;
        for (int32_t i = 0; i < choice->chosen_groups; ++i) among |= best[i] == g;
        for (int32_t e = g * of_one; !among && e < (g + 1) * of_one; ++e) numbers[e] = -INFINITY;
    }
}

/* Shares of the chosen experts among the experts left whose logits lie within 2 % of theirs, or of the size of their own:
 * twice the noise of SparseMixer's training. */
static void weigh_near(const pw_op *op, const float *logits, const int32_t *chosen, float *weight) {
    double numbers[PW_MAX_EXPERTS];
    for (int32_t e = 0; e < op->experts.count; ++e) numbers[e] = logits[e];
    for (int32_t i = 0; i < op->experts.chosen; ++i) {
        double top = numbers[chosen[i]], total = 0;
        for (int32_t e = 0; e < op->experts.count; ++e) {
            double size = fabs(numbers[e]) > top ? fabs(numbers[e]) : top;
            bool far = (top - numbers[e]) / size > 0.02;
            if (!far && numbers[e] != -INFINITY) total += pw_exponential(numbers[e] - top);
        }
        weight[i] = (float)(op->choice.scale / total);
        numbers[chosen[i]] = -INFINITY;
    }
}

/* Weights of the chosen experts: their shares of a softmax, or logistics. */
static void weigh_chosen(const pw_op *op, const float *logits, const int32_t *chosen, float *weight) {
    const pw_experts *experts = &op->experts;
    bool is_logistic = op->choice.scores == PW_LOGISTIC;
    double scores[PW_MAX_EXPERTS], top = largest_of(logits, experts->count), total = is_logistic ? 1e-20 : 0;
    for (int32_t i = 0; i < experts->chosen; ++i) {
        double logit = logits[chosen[i]];
        scores[i] = is_logistic ? pw_logistic(logit) : pw_exponential(logit - top);
        total += scores[i];
    }
    if (!experts->normalised) total = is_logistic ? 1 : sum_of_all(experts, logits, top);
    for (int32_t i = 0; i < experts->chosen; ++i) {
        double factor = op->choice.scale;
        if (op->choice.factors) factor *= op->choice.factors[chosen[i]];
        weight[i] = (float)(scores[i] / total * factor);
    }
}

static void route_row(const pw_run *run, const pw_op *op, int64_t row) {
    const pw_program *program = run->program;
    const pw_experts *experts = &op->experts;
    const float *logits = program->arena + op->in + row * op->in_stride;
    int32_t *chosen = program->routes.expert + row * experts->chosen;
    double numbers[PW_MAX_EXPERTS];
    find_numbers(op, logits, numbers);
    if (op->choice.chosen_groups < op->choice.groups) leave_groups_out(op, numbers);
    for (int32_t i = 0; i < experts->chosen; ++i) chosen[i] = next_chosen(numbers, experts->count, chosen, i);
    (op->choice.scores == PW_SPARSE_MIXER ? weigh_near : weigh_chosen)(
        op, logits, chosen, program->routes.weight + row * experts->chosen);
}

/* A counting sort: rows by their experts. */
static void gather(pw_routes *routes, const pw_experts *experts, int64_t rows) {
    int64_t pairs = rows * experts->chosen;
    memset(routes->first, 0, sizeof *routes->first * (size_t)(experts->count + 1));
    for (int64_t i = 0; i < pairs; ++i) routes->first[routes->expert[i] + 1] += 1;
    for (int32_t e = 0; e < experts->count; ++e) routes->first[e + 1] += routes->first[e];
    for (int64_t i = 0; i < pairs; ++i) {
        int32_t e = routes->expert[i];
        routes->pair[i] = routes->first[e]++;
        routes->expert_of[routes->pair[i]] = e;
    }
    for (int32_t e = experts->count; e > 0; --e) routes->first[e] = routes->first[e - 1];
    routes->first[0] = 0;
}

static int64_t rows_of_expert(const pw_routes *routes, int32_t e) { return routes->first[e + 1] - routes->first[e]; }

static void find_busy(pw_routes *routes, const pw_experts *experts) {
    routes->n_busy = 0;
    for (int32_t e = 0; e < experts->count; ++e) {
        int64_t rows = rows_of_expert(routes, e);
        if (rows == 0) continue;
        int32_t at = routes->n_busy++;
        for (; at > 0 && rows_of_expert(routes, routes->busy[at - 1]) < rows; --at)
            routes->busy[at] = routes->busy[at - 1];
        routes->busy[at] = e;
    }
}

/* Every rank finds the same routes for itself. */
void pw_run_route(pw_run *run, const pw_op *op, int member) {
    pw_routes *routes = &run->program->routes;
    int64_t rows = pw_op_rows(run, op);
    for (int64_t row = rows * member / run->threads; row < rows * (member + 1) / run->threads; ++row)
        route_row(run, op, row);
    if (rows > 1) pw_team_barrier(run->team, member);
    if (rows > 1 ? member > 0 : member + 1 < run->threads) return; /* of one row: the member that has routed it */
    gather(routes, &op->experts, rows);
    find_busy(routes, &op->experts);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* A row's normalised or plain numbers, prepared once and copied to each of its pairs, or for each pair times its weight. */
static void prepare_row(const pw_run *run, const pw_op *op, int64_t row, int64_t bytes, char *scratch) {
    const pw_program *program = run->program;
    const pw_routes *routes = &program->routes;
    float *normed = (float *)(scratch + program->private_row_bytes);
    const pw_op_kernels *ops = &run->kernels->ops;
    for (int64_t i = row * op->experts.chosen; i < (row + 1) * op->experts.chosen; ++i) {
        if (i == row * op->experts.chosen || op->experts.weighs_inputs) {
            const float *x = program->arena + op->in + row * op->in_stride;
            if (op->source == PW_FROM_NORM) {
                ops->rmsnorm(op->k, x, op->norm, op->eps, normed);
                x = normed;
            }
            if (op->experts.weighs_inputs) {
                if (x != normed) memcpy(normed, x, sizeof(float) * (size_t)op->k);
                ops->scale(op->k, routes->weight[i], normed);
                x = normed;
            }
            run->kernels->gemm.prepare_rows(&op->preparation.forms[0], op->k, x, 0, (pw_range){0, 1}, scratch);
        }
        memcpy(program->pairs + routes->pair[i] * bytes, scratch, (size_t)bytes);
    }
}

static void prepare_pair(const pw_run *run, const pw_op *op, int64_t pair, float *scratch) {
    const pw_program *program = run->program;
    const pw_op_kernels *ops = &run->kernels->ops;
    const float *x = program->arena + op->in + pair * op->in_stride;
    if (op->bias) {
        const float *bias = op->bias + program->routes.expert_of[pair] * 2 * op->k;
        memcpy(scratch, x, sizeof(float) * 2 * (size_t)op->k);
        ops->add(2 * op->k, bias, scratch);
        x = scratch;
    }
    if (op->source == PW_FROM_GATE) ops->gates[op->gate](op->k, x, x + op->k, scratch);
    else ops->activations[op->gate](op->k, x, NULL, scratch);
    run->kernels->gemm.prepare_rows(&op->preparation.forms[0], op->k, scratch, 0, (pw_range){pair, pair + 1}, program->pairs);
}

static bool prepare(pw_run *run, const pw_op *op, int member, int64_t bytes) {
    const pw_program *program = run->program;
    char *scratch = program->scratch + member * program->scratch_bytes;
    bool of_pairs = op->source == PW_FROM_GATE || op->source == PW_FROM_ACTIVATION;
    int64_t rows = pw_op_rows(run, op);
    pw_range own = pw_rows_of(run, of_pairs ? rows * op->experts.chosen : rows, member);
    for (int64_t i = own.begin; i < own.end; ++i) {
        if (of_pairs) prepare_pair(run, op, i, (float *)scratch);
        else prepare_row(run, op, i, bytes, scratch);
    }
    return pw_meet(run, member);
}

/* Expert e's rows times some of its panels. */
static void multiply(const pw_run *run, const pw_op *op, int32_t e, pw_range panels, int64_t bytes) {
    const pw_program *program = run->program;
    const pw_column_share *share = &op->shares[run->table][0];
    int64_t first = program->routes.first[e], rows = rows_of_expert(&program->routes, e);
    int64_t before = e * pw_panels(op->experts.n);
    pw_activations x = {program->pairs + first * bytes, bytes};
    pw_schedule schedule = pw_schedule_for(&share->schedules, &share->weight, rows, 1);
    float *y = program->arena + op->out + first * op->out_stride - before * PW_PANEL;
    pw_range all = {0, rows}, own = {before + panels.begin, before + panels.end};
    pw_weight stack = op->parts[0].weight;
    run->kernels->gemm.gemm(&stack, &x, all, own, -1, y, op->out_stride, PW_STORE, &schedule);
}

void pw_run_experts(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    const pw_routes *routes = &program->routes;
    if (pw_op_rows(run, op) == 0) return;
    int64_t bytes = run->kernels->gemm.row_bytes(&op->preparation.forms[0], op->k);
    if (!prepare(run, op, member, bytes)) return;
    pw_range own = pw_share_of(run->division, pw_panels(op->experts.n));
    int64_t panels = own.end - own.begin, wanted = PIECES_PER_THREAD * (int64_t)run->threads;
    if (panels == 0) return;
    int64_t each = panels * routes->n_busy / wanted;
    each = each < 1 ? 1 : each > panels ? panels : each;
    int64_t of_one = (panels + each - 1) / each;
    atomic_long *next = &program->tickets[(op - program->ops) * PW_MAX_PARTS].next;
    for (int64_t i; (i = atomic_fetch_add_explicit(next, 1, memory_order_relaxed)) < of_one * routes->n_busy;) {
        int64_t begin = own.begin + i % of_one * each, end = begin + each < own.end ? begin + each : own.end;
        multiply(run, op, routes->busy[i / of_one], (pw_range){begin, end}, bytes);
    }
}

/* ---- sums ------------------------------------------------------------------------------------------------------- */

void pw_run_combine(pw_run *run, const pw_op *op, int member) {
    const pw_program *program = run->program;
    const pw_routes *routes = &program->routes;
    const pw_op_kernels *ops = &run->kernels->ops;
    pw_range own = pw_rows_of(run, pw_op_rows(run, op), member);
    for (int64_t row = own.begin; row < own.end; ++row) {
        float *out = program->arena + op->out + row * op->out_stride;
        if (op->epilogue == PW_STORE) memset(out, 0, sizeof(float) * (size_t)op->k);
        for (int64_t i = row * op->experts.chosen; i < (row + 1) * op->experts.chosen; ++i) {
            float weight = op->experts.weighs_inputs ? 1.0f : routes->weight[i];
            ops->add_scaled(op->k, weight, program->arena + op->in + routes->pair[i] * op->in_stride, out);
            if (op->bias) ops->add_scaled(op->k, weight, op->bias + routes->expert[i] * op->k, out);
        }
    }
}
