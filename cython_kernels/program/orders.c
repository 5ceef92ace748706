#include "program/orders.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOTHING, RUN, REST, STOP };

#define SPIN_NS 200000L      /* between two steps of a batch a rank does not sleep */
#define LOOK_NS 1000000000L  /* how often a waiting rank looks whether rank 0's process is still there */

void pw_orders_open(pw_program *program) {
    pw_orders *orders = program->orders;
    orders->shared_bytes = pw_program_shared_bytes(program);
    orders->n_ops = program->n_ops;
    orders->table = -1;
    for (int32_t i = 0; i < PW_SCHEDULE_TABLES * program->n_ranks; ++i)
        for (int32_t thread = 0; thread < PW_OBSERVED_THREADS; ++thread)
            atomic_store(&pw_observation_of(orders, program->n_ranks, 0, i)->cpus[thread], -1);
}

bool pw_orders_fit(const pw_program *program, const char *shared) {
    const pw_orders *orders = (const pw_orders *)(const void *)(shared + pw_orders_offset(program->n_ranks));
    return pw_group_ranks((const pw_group *)(const void *)shared) == program->n_ranks &&
           orders->shared_bytes == pw_program_shared_bytes(program) && orders->n_ops == program->n_ops;
}

const int32_t *pw_orders_observed(const pw_program *program, int32_t table, int32_t rank) {
    return (const int32_t *)pw_observation_of(program->orders, program->n_ranks, table, rank)->cpus;
}

int64_t pw_orders_misplaced(const pw_program *program, int32_t table, int32_t rank) {
    return atomic_load(&pw_observation_of(program->orders, program->n_ranks, table, rank)->misplaced);
}

/* ---- a run, on any rank ----------------------------------------------------------------------------------------- */

static void tell_where(const pw_program *program, const pw_team *team, int32_t table) {
    pw_observation *seen = pw_observation_of(program->orders, program->n_ranks, table, program->rank);
    int cpus[PW_OBSERVED_THREADS];
    pw_team_observed(team, cpus);
    for (int i = 0; i < pw_team_size(team); ++i) atomic_store_explicit(&seen->cpus[i], cpus[i], memory_order_relaxed);
    atomic_store_explicit(&seen->misplaced, pw_team_misplaced(team), memory_order_relaxed);
}

/* This rank's share. A rank that cannot run it ends the step for all ranks. */
static int run_share(pw_program *program, pw_team *team, int32_t table) {
    int status = pw_program_run(program, team, table);
    if (status == PW_TEAM_OK) tell_where(program, team, table);
    else pw_group_fail(program->group);
    return status;
}

/* ---- rank 0 ----------------------------------------------------------------------------------------------------- */

static void send(pw_program *program, int32_t rank, unsigned order) {
    atomic_store_explicit(&program->orders->boxes[rank].order, order, memory_order_release);
    pw_group_ring(program->group, rank);
}

int pw_orders_run(pw_program *program, pw_team *team, int32_t table, pw_team *resting) {
    pw_orders *orders = program->orders;
    const pw_step *step = &program->step;
    int32_t ranks = program->divisions[table].ranks;
    if (pw_group_failed(program->group)) return PW_RUN_GROUP_FAILED;
    int32_t before = orders->table >= 0 && orders->table != table ? program->divisions[orders->table].ranks : 0;
    orders->table = table;
    orders->n_tokens = step->n_tokens;
    orders->n_slices = step->n_slices;
    orders->n_logit_rows = step->n_logit_rows;
    strncpy(orders->isa, pw_active()->isa, PW_ORDERS_ISA_NAME - 1);
    for (int32_t rank = 1; rank < ranks; ++rank) send(program, rank, RUN);
    for (int32_t rank = ranks; rank < before; ++rank) send(program, rank, REST);
    if (resting) pw_team_rest(resting); /* not earlier: a core that falls idle takes long to wake */
    return run_share(program, team, table);
}

void pw_orders_stop(pw_program *program) {
    for (int32_t rank = 1; rank < program->n_ranks; ++rank) send(program, rank, STOP);
}

/* ---- the other ranks -------------------------------------------------------------------------------------------- */

typedef struct {
    pw_program *program;
    pw_team *const *teams;
    pw_team *last; /* that ran; its threads may still be spinning */
    long spin_ns;
    uint32_t rung;
} server;

static void rest(server *s) {
    if (s->last) pw_team_rest(s->last);
    s->last = NULL;
    s->spin_ns = 0; /* another rank may use this core now */
}

static int run_step(server *s) {
    pw_program *program = s->program;
    const pw_orders *orders = program->orders;
    int32_t table = orders->table;
    pw_team *team = s->teams[table];
    if (!team || (strcmp(orders->isa, pw_active()->isa) && pw_select(orders->isa))) return PW_RUN_MISFIT;
    if (s->last && s->last != team) pw_team_rest(s->last);
    s->last = team;
    s->spin_ns = SPIN_NS;
    program->step.n_tokens = orders->n_tokens;
    program->step.n_slices = orders->n_slices;
    program->step.n_logit_rows = orders->n_logit_rows;
    if (pw_program_check(program, pw_team_size(team), table)) return PW_RUN_MISFIT;
    return run_share(program, team, table);
}

int pw_orders_serve(pw_program *program, pw_team *const *teams) {
    server s = {.program = program, .teams = teams};
    pid_t first_rank = getppid();
    for (;;) {
        pw_letter_box *box = &program->orders->boxes[program->rank];
        unsigned order = atomic_exchange_explicit(&box->order, NOTHING, memory_order_acquire);
        int status = PW_TEAM_OK;
        if (order == STOP) return PW_SERVED;
        if (order == REST) rest(&s);
        if (order == RUN) status = run_step(&s);
        if (status != PW_TEAM_OK) {
            pw_group_fail(program->group);
            return status;
        }
        uint32_t rung = s.rung;
        int told = pw_group_wait_bell(program->group, program->rank, s.rung, s.spin_ns, LOOK_NS, &rung);
        if (told == PW_GROUP_FAILED) return PW_RUN_GROUP_FAILED;
        if (told == PW_GROUP_LATE && getppid() != first_rank) return PW_SERVE_ORPHANED;
        if (told == PW_GROUP_LATE) s.spin_ns = 0;
        s.rung = rung;
    }
}
