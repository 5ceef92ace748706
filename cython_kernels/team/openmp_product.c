#define _GNU_SOURCE
#include "team/openmp_product.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "memory/pages.h"
#include "simd/common.h"

struct pw_openmp_team {
    pw_openmp library;
    int threads;
    pthread_mutex_t turn;
    pw_ticket *tickets; /* [threads] */
    char *memory;       /* pages: prepared rows, a row of float32 for each member, y in float32 */
    int64_t memory_bytes;
};

pw_openmp_team *pw_openmp_open(pw_openmp library, int threads) {
    pw_openmp_team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    team->tickets = aligned_alloc(PW_LINE, sizeof(pw_ticket) * (size_t)threads);
    if (!team->tickets) {
        free(team);
        return NULL;
    }
    team->library = library;
    team->threads = threads;
    pthread_mutex_init(&team->turn, NULL);
    return team;
}

void pw_openmp_close(pw_openmp_team *team) {
    if (!team) return;
    pthread_mutex_destroy(&team->turn);
    pw_pages_close(team->memory, team->memory_bytes);
    free(team->tickets);
    free(team);
}

typedef struct {
    const pw_openmp_team *team;
    int *cpus;
} observation;

static void observe(void *context) {
    const observation *o = context;
    int member = o->team->library.member();
    if (member < o->team->threads) o->cpus[member] = sched_getcpu();
}

void pw_openmp_observe(pw_openmp_team *team, int *cpus) {
    observation o = {team, cpus};
    for (int i = 0; i < team->threads; ++i) cpus[i] = -1;
    team->library.parallel(observe, &o, (unsigned)team->threads, 0);
}

/* ---- one product ------------------------------------------------------------------------------------------------ */

typedef struct {
    const pw_openmp_team *team;
    const pw_openmp_call *call;
    const pw_gemm_kernels *kernels;
    pw_form form;
    int64_t row_bytes;
    char *prepared;
    float *wide, *sums; /* wide: [threads][k]; sums: [rows][n], which is y itself where it is float32 */
    atomic_long next_row;
} job;

/* Row `row` of x in the form that the kernel reads; `wide` has room for k numbers. */
static void prepare_row(const job *j, int64_t row, float *wide) {
    const pw_openmp_call *c = j->call;
    int64_t k = c->weight->k;
    const float *x = (const float *)c->x + row * k;
    if (c->number == PW_BFLOAT16) {
        const uint16_t *from = (const uint16_t *)c->x + row * k;
        for (int64_t i = 0; i < k; ++i) wide[i] = pw_from_bf16(from[i]);
        x = wide;
    }
    j->kernels->prepare_rows(&j->form, k, x, 0, (pw_range){row, row + 1}, j->prepared);
}

static void prepare_share(void *context) {
    job *j = context;
    int member = j->team->library.member();
    if (member >= j->team->threads) return;
    float *wide = j->wide + member * j->call->weight->k;
    for (;;) {
        int64_t row = atomic_fetch_add_explicit(&j->next_row, 1, memory_order_relaxed);
        if (row >= j->call->rows) return;
        prepare_row(j, row, wide);
    }
}

/* Adds the bias to finished sums, and rounds them. */
static void finish(const void *what, pw_range rows, pw_range columns) {
    const job *j = what;
    const pw_openmp_call *c = j->call;
    int64_t n = c->weight->n;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float *sums = j->sums + row * n;
        if (c->number == PW_FLOAT32) {
            const float *bias = c->bias;
            for (int64_t i = columns.begin; i < columns.end; ++i) sums[i] += bias[i];
            continue;
        }
        const uint16_t *bias = c->bias;
        uint16_t *y = (uint16_t *)c->y + row * n;
        if (bias)
            for (int64_t i = columns.begin; i < columns.end; ++i) y[i] = pw_to_bf16(sums[i] + pw_from_bf16(bias[i]));
        else
            for (int64_t i = columns.begin; i < columns.end; ++i) y[i] = pw_to_bf16(sums[i]);
    }
}

static void multiply_share(void *context) {
    const job *j = context;
    const pw_openmp_call *c = j->call;
    int member = j->team->library.member(), threads = j->team->threads;
    if (member >= threads) return;
    pw_product p = {.weight = c->weight, .x = {j->prepared, j->row_bytes}, .rows = c->rows, .y = j->sums};
    p.ldy = c->weight->n;
    p.finish = c->bias || c->number != PW_FLOAT32 ? finish : NULL;
    p.what = j;
    pw_crew crew = {.threads = threads, .kernels = j->kernels, .tickets = j->team->tickets, .most_regions = threads};
    pw_multiply(&p, c->schedule, &crew, member);
}

static bool make_room(pw_openmp_team *team, int64_t bytes) {
    if (bytes <= team->memory_bytes) return true;
    char *memory = pw_pages_open(bytes);
    if (!memory) return false;
    pw_pages_close(team->memory, team->memory_bytes);
    team->memory = memory;
    team->memory_bytes = bytes;
    return true;
}

static bool lay_out(pw_openmp_team *team, job *j) {
    const pw_openmp_call *c = j->call;
    const pw_weight *w = c->weight;
    bool is_narrow = c->number == PW_BFLOAT16;
    j->row_bytes = j->kernels->row_bytes(&j->form, w->k);
    int64_t prepared = pw_whole_lines(c->rows * j->row_bytes), wide = pw_whole_lines(is_narrow ? team->threads * w->k * 4 : 0);
    if (!make_room(team, prepared + wide + (is_narrow ? c->rows * w->n * 4 : 0))) return false;
    j->prepared = team->memory;
    j->wide = (float *)(team->memory + prepared);
    j->sums = is_narrow ? (float *)(team->memory + prepared + wide) : c->y;
    return true;
}

bool pw_openmp_multiply(pw_openmp_team *team, const pw_openmp_call *call) {
    const pw_gemm_kernels *kernels = &pw_active()->gemm;
    job j = {.team = team, .call = call, .kernels = kernels, .form = pw_form_of(call->weight)};
    pthread_mutex_lock(&team->turn);
    bool has_room = lay_out(team, &j);
    if (has_room) {
        pw_clear_tickets(team->tickets, team->threads, 1, 0);
        if (call->rows == 1) prepare_row(&j, 0, j.wide); /* cheaper than to call the others */
        else team->library.parallel(prepare_share, &j, (unsigned)team->threads, 0);
        team->library.parallel(multiply_share, &j, (unsigned)team->threads, 0);
    }
    pthread_mutex_unlock(&team->turn);
    return has_room;
}
