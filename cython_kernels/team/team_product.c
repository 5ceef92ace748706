#include "team/team_product.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "memory/pages.h"

static bool lay_out(pw_team_product *t) {
    const pw_weight *w = t->weights;
    t->ldy = pw_panels(w->n) * PW_PANEL;
    t->row_bytes = t->kernels->gemm.row_bytes(&t->form, w->k);
    t->split_floats = w->k_parts > 1 ? pw_split_floats(w, t->rows) : 0;
    int64_t x = pw_whole_lines(t->rows * w->k * 4), prepared = pw_whole_lines(t->rows * t->row_bytes);
    int64_t y = pw_whole_lines(t->rows * t->ldy * 4);
    t->memory_bytes = x + prepared + y + t->split_floats * 4;
    t->memory = pw_pages_open(t->memory_bytes);
    if (!t->memory) return false;
    t->x = (float *)t->memory;
    t->prepared = t->memory + x;
    t->y = (float *)(t->prepared + prepared);
    t->split = t->split_floats ? (float *)((char *)t->y + y) : NULL;
    return true;
}

pw_team_product *pw_team_product_open(pw_team *team, int32_t n_weights, const pw_weight *weights, int64_t rows) {
    pw_team_product *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->kernels = pw_active();
    t->team = team;
    t->threads = pw_team_size(team);
    t->n_weights = n_weights;
    t->rows = rows;
    t->form = pw_form_of(weights);
    t->weights = malloc(sizeof *weights * (size_t)n_weights);
    t->tickets = aligned_alloc(PW_LINE, sizeof(pw_ticket) * 2 * (size_t)t->threads);
    if (!t->weights || !t->tickets) {
        pw_team_product_close(t);
        return NULL;
    }
    memcpy(t->weights, weights, sizeof *weights * (size_t)n_weights);
    if (!lay_out(t)) {
        pw_team_product_close(t);
        return NULL;
    }
    return t;
}

void pw_team_product_close(pw_team_product *t) {
    if (!t) return;
    pw_pages_close(t->memory, t->memory_bytes);
    free(t->tickets);
    free(t->weights);
    free(t);
}

static pw_range rows_of(const pw_team_product *t, int member) {
    return (pw_range){t->rows * member / t->threads, t->rows * (member + 1) / t->threads};
}

/* float32 rows that need no line between them are read where they are; on some cores, all of them. */
static bool in_place(const pw_team_product *t) {
    return t->form.kind == PW_F32 && (pw_core()->rows_in_place || t->row_bytes == 4 * t->weights->k);
}

static pw_activations rows_to_read(const pw_team_product *t) {
    if (in_place(t)) return (pw_activations){t->x, 4 * t->weights->k};
    return (pw_activations){t->prepared, t->row_bytes};
}

static void prepare(const pw_team_product *t, int member) {
    if (in_place(t)) return;
    t->kernels->gemm.prepare_rows(&t->form, t->weights->k, t->x, t->weights->k, rows_of(t, member), t->prepared);
}

static void prepare_share(void *context, int member) { prepare(context, member); }

/* Numbers of a linear congruential generator (Knuth, MMIX), whose high bits are good. */
int pw_team_product_fill(pw_team_product *t, uint64_t seed) {
    for (int64_t i = 0; i < t->rows * t->weights->k; ++i) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        t->x[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f;
    }
    return pw_team_run(t->team, prepare_share, t);
}

typedef struct {
    pw_team_product *product;
    const pw_schedule *schedule;
    int calls;
    bool prepare;
    _Atomic int64_t *barriers; /* [calls + 1], when each opened: between them lie the calls */
} timing;

/* A barrier opened when the first member came out of it. Any one member, the clock's owner too, may be off its core
 * just then while the others go on: by its clock, one call would be too long and the next one too short. */
static void note_opening(_Atomic int64_t *at) {
    int64_t now = pw_now_ns(), earliest = atomic_load(at);
    while (now < earliest && !atomic_compare_exchange_weak(at, &earliest, now)) {}
}

static void time_share(void *context, int member) {
    const timing *job = context;
    const pw_team_product *t = job->product;
    pw_team_barrier(t->team, member); /* all are awake */
    note_opening(job->barriers);
    for (int call = 0; call < job->calls; ++call) {
        pw_product p = {.weight = &t->weights[(t->taken + call) % t->n_weights], .rows = t->rows};
        p.x = rows_to_read(t);
        p.y = t->y;
        p.ldy = t->ldy;
        pw_crew crew = {t->team, t->threads, &t->kernels->gemm, t->tickets + call % 2 * t->threads, t->threads,
                        t->split, t->split_floats};
        pw_clear_tickets(t->tickets + (call + 1) % 2 * t->threads, t->threads, t->threads, member);
        if (job->prepare) {
            prepare(t, member);
            pw_team_barrier(t->team, member);
        }
        pw_multiply(&p, job->schedule, &crew, member);
        pw_team_barrier(t->team, member);
        note_opening(job->barriers + call + 1);
    }
}

int pw_team_product_time(pw_team_product *t, const pw_schedule *schedule, int calls, bool prepare, int64_t *ns) {
    timing job = {t, schedule, calls, prepare, malloc(sizeof *job.barriers * ((size_t)calls + 1))};
    if (!job.barriers) return PW_TEAM_NO_MEMORY;
    for (int i = 0; i <= calls; ++i) atomic_init(job.barriers + i, INT64_MAX);
    memset(t->y, 0xFF, sizeof(float) * (size_t)(t->rows * t->ldy)); /* NaN: what a schedule left out would show */
    memset(t->tickets, 0, sizeof(pw_ticket) * 2 * (size_t)t->threads);
    int status = pw_team_run(t->team, time_share, &job);
    for (int i = 0; i < calls; ++i) ns[i] = atomic_load(job.barriers + i + 1) - atomic_load(job.barriers + i);
    free(job.barriers);
    t->taken = (t->taken + calls) % t->n_weights;
    return status;
}
