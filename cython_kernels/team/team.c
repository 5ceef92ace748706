#define _GNU_SOURCE
#include "team/team.h"
#include "team/waiting.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_CPUS 8192
#define BARRIER_SPIN_NS 200000 /* longer, and the host took a CPU away or the shares were uneven: sleep */

typedef struct {
    cpu_set_t sets[MAX_CPUS / CPU_SETSIZE];
} cpu_mask;

/* A thread that has been member 0 of open teams: the CPU that one of them has pinned it to, and where it might run
 * before. */
typedef struct borrowed {
    struct borrowed *next;
    pid_t thread;
    int teams;
    int cpu; /* -1: not yet */
    cpu_mask home;
} borrowed;

/* A counter that threads wait upon, alone on its cache line. */
typedef struct {
    _Alignas(PW_LINE) atomic_uint value;
    atomic_int sleepers;
} signal_word;

typedef struct {
    _Alignas(PW_LINE) pw_team *team;
    pthread_t thread;
    int index;
    int cpu;
    atomic_int observed;
    atomic_long misplaced;
} member;

struct pw_team {
    signal_word epoch;      /* one more for every task */
    signal_word generation; /* one more for every barrier passed */
    pw_arrivals *counters;
    pw_arrivals **first; /* each member's own */
    int64_t *ends;       /* [2][n_members + 1]: sums of weights, streaming and computing; NULL: all are alike */
    _Alignas(PW_LINE) atomic_bool resting;
    _Alignas(PW_LINE) pw_task task;
    void *context;
    bool closing;
    bool pinned;
    int n_members;
    int n_started;
    long idle_spin_ns;
    pid_t process;
    borrowed *caller;
    pthread_mutex_t one_task;
    member *members;
};

static pthread_mutex_t borrowed_lock = PTHREAD_MUTEX_INITIALIZER;
static borrowed *borrowed_threads;

/* ---- waiting: spin, then sleep ---------------------------------------------------------------------------------- */

/* True once the word differs from `old`; false when spin_ns went by, or at once when the team should rest. */
static bool spin_for_change(signal_word *word, unsigned old, long spin_ns, atomic_bool *resting) {
    long deadline = 0;
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (atomic_load_explicit(&word->value, memory_order_acquire) != old) return true;
            if (resting && atomic_load_explicit(resting, memory_order_relaxed)) return false;
            relax();
        }
        long now = now_ns();
        if (deadline == 0) deadline = now + spin_ns;
        if (now >= deadline) return false;
    }
}

static void wait_for_change(signal_word *word, unsigned old, long spin_ns, atomic_bool *resting) {
    if (spin_for_change(word, old, spin_ns, resting)) return;
    atomic_fetch_add(&word->sleepers, 1);
    while (atomic_load(&word->value) == old)
        syscall(SYS_futex, &word->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&word->sleepers, 1);
}

/* The increment and the look at `sleepers` are sequentially consistent, as are a sleeper's announcement and its last
 * look at the value (the kernel repeats that look under its own lock): one of the two sees the other. */
static void advance(signal_word *word) {
    atomic_fetch_add(&word->value, 1);
    if (atomic_load(&word->sleepers) > 0) syscall(SYS_futex, &word->value, FUTEX_WAKE_PRIVATE, MAX_CPUS, NULL, NULL, 0);
}

static void meet_no_other(void *context) { (void)context; }

void pw_team_barrier(pw_team *team, int index) {
    if (team->n_members > 1) pw_team_barrier_beyond(team, index, meet_no_other, NULL);
}

void pw_team_barrier_beyond(pw_team *team, int index, void (*meet)(void *), void *context) {
    unsigned generation = atomic_load_explicit(&team->generation.value, memory_order_relaxed);
    if (pw_arrive(team->first[index])) {
        meet(context);
        advance(&team->generation);
    } else {
        wait_for_change(&team->generation, generation, BARRIER_SPIN_NS, NULL);
    }
}

/* ---- pinning ---------------------------------------------------------------------------------------------------- */

static cpu_mask mask_of(int cpu) {
    cpu_mask mask;
    memset(&mask, 0, sizeof mask);
    CPU_SET_S(cpu, sizeof mask, mask.sets);
    return mask;
}

static int pin_thread(pid_t thread, int cpu) {
    cpu_mask mask = mask_of(cpu);
    return sched_setaffinity(thread, sizeof mask, mask.sets);
}

static void look_where_we_run(member *self) {
    int cpu = sched_getcpu();
    atomic_store_explicit(&self->observed, cpu, memory_order_relaxed);
    if (self->cpu >= 0 && cpu != self->cpu) atomic_fetch_add_explicit(&self->misplaced, 1, memory_order_relaxed);
}

static borrowed *borrow_thread(pid_t thread) {
    pthread_mutex_lock(&borrowed_lock);
    borrowed *found = borrowed_threads;
    while (found && found->thread != thread) found = found->next;
    if (!found && (found = calloc(1, sizeof *found))) {
        found->thread = thread;
        found->cpu = -1;
        found->next = borrowed_threads;
        borrowed_threads = found;
    }
    if (found) found->teams += 1;
    pthread_mutex_unlock(&borrowed_lock);
    return found;
}

/* False: somebody has given the thread another affinity than a team did, e.g. by taskset; `now` is that one. */
static bool is_as_pinned(const borrowed *caller, cpu_mask *now) {
    memset(now, 0, sizeof *now);
    if (sched_getaffinity(caller->thread, sizeof *now, now->sets) < 0 || caller->cpu < 0) return false;
    cpu_mask pinned = mask_of(caller->cpu);
    return CPU_EQUAL_S(sizeof pinned, pinned.sets, now->sets);
}

/* Gives a thread its former affinity back once no team needs it, unless it has got another one meanwhile. The thread
 * may have ended. */
static void return_thread(borrowed *caller) {
    if (!caller) return;
    pthread_mutex_lock(&borrowed_lock);
    if (--caller->teams == 0) {
        borrowed **link = &borrowed_threads;
        while (*link != caller) link = &(*link)->next;
        *link = caller->next;
        cpu_mask now;
        if (syscall(SYS_tgkill, getpid(), caller->thread, 0) == 0 && is_as_pinned(caller, &now))
            sched_setaffinity(caller->thread, sizeof caller->home, caller->home.sets);
        free(caller);
    }
    pthread_mutex_unlock(&borrowed_lock);
}

static _Thread_local pid_t own_id;

/* Teams of one thread may want it in different places in turn. A CPU may be taken away under an open team: it went
 * offline, or out of the cpuset. Its thread then runs where the kernel puts it, and `misplaced` counts such threads until
 * the team is closed. */
static int take_caller(pw_team *team) {
    if (!team->pinned) return PW_TEAM_OK;
    if (own_id == 0) own_id = (pid_t)syscall(SYS_gettid);
    if (!team->caller || team->caller->thread != own_id) {
        return_thread(team->caller);
        team->caller = borrow_thread(own_id);
        if (!team->caller) return PW_TEAM_NO_MEMORY;
    }
    borrowed *caller = team->caller;
    int cpu = team->members[0].cpu;
    if (caller->cpu == cpu && sched_getcpu() == cpu) return PW_TEAM_OK;
    cpu_mask now;
    if (!is_as_pinned(caller, &now)) caller->home = now;
    if (pin_thread(0, cpu) == 0) caller->cpu = cpu;
    return PW_TEAM_OK;
}

/* ---- running ---------------------------------------------------------------------------------------------------- */

static void run_share(pw_team *team, member *self) {
    look_where_we_run(self);
    team->task(team->context, self->index);
    pw_team_barrier(team, self->index);
}

static void *live(void *argument) {
    member *self = argument;
    pw_team *team = self->team;
    for (unsigned seen = 0;; ++seen) {
        wait_for_change(&team->epoch, seen, team->idle_spin_ns, &team->resting);
        if (team->closing) return NULL;
        run_share(team, self);
    }
}

int pw_team_run(pw_team *team, pw_task task, void *context) {
    if (getpid() != team->process) return PW_TEAM_FORKED;
    pthread_mutex_lock(&team->one_task);
    int status = take_caller(team);
    if (status == PW_TEAM_OK) {
        team->task = task;
        team->context = context;
        atomic_store_explicit(&team->resting, false, memory_order_relaxed);
        advance(&team->epoch);
        run_share(team, &team->members[0]);
    }
    pthread_mutex_unlock(&team->one_task);
    return status;
}

int pw_team_size(const pw_team *team) { return team->n_members; }

static void sum_up(int n, const int *weights, int64_t *ends) {
    ends[0] = 0;
    for (int i = 0; i < n; ++i) ends[i + 1] = ends[i] + weights[i];
}

int pw_team_weigh(pw_team *team, const int *streaming, const int *computing) {
    int n = team->n_members;
    int64_t *ends = NULL;
    if (streaming && computing) {
        ends = malloc(sizeof *ends * 2 * (size_t)(n + 1));
        if (!ends) return PW_TEAM_NO_MEMORY;
        sum_up(n, streaming, ends);
        sum_up(n, computing, ends + n + 1);
    }
    pthread_mutex_lock(&team->one_task);
    free(team->ends);
    team->ends = ends;
    pthread_mutex_unlock(&team->one_task);
    return PW_TEAM_OK;
}

const int64_t *pw_team_ends(const pw_team *team, bool streaming) {
    if (!team->ends) return NULL;
    return streaming ? team->ends : team->ends + team->n_members + 1;
}

int pw_team_crossings(const pw_team *team) { return pw_arrivals_crossings(team->n_members, team->first); }

unsigned pw_team_passed(const pw_team *team) { return atomic_load(&team->generation.value); }

void pw_team_rest(pw_team *team) { atomic_store(&team->resting, true); }

void pw_team_observed(const pw_team *team, int *cpus) {
    for (int i = 0; i < team->n_members; ++i) cpus[i] = atomic_load(&team->members[i].observed);
}

long pw_team_misplaced(const pw_team *team) {
    long sum = 0;
    for (int i = 0; i < team->n_members; ++i) sum += atomic_load(&team->members[i].misplaced);
    return sum;
}

/* ---- opening and closing ---------------------------------------------------------------------------------------- */

/* Tries a CPU on the calling thread, which then gets its affinity back. */
static bool can_pin(int cpu) {
    cpu_mask home;
    if (cpu < 0 || cpu >= MAX_CPUS) return false;
    if (sched_getaffinity(0, sizeof home, home.sets) < 0) return false;
    if (pin_thread(0, cpu) != 0) return false;
    sched_setaffinity(0, sizeof home, home.sets);
    return true;
}

static bool check_cpus(int n, const int *cpus, char *message, size_t bytes) {
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j < i; ++j)
            if (cpus[i] == cpus[j]) {
                snprintf(message, bytes, "CPU %d is named twice in one thread team", cpus[i]);
                return false;
            }
        if (!can_pin(cpus[i])) {
            snprintf(message, bytes,
                     "cannot pin a thread to CPU %d: it is absent, offline or not allowed to this process", cpus[i]);
            return false;
        }
    }
    return true;
}

static int start_member(member *self) {
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    if (self->cpu >= 0) {
        cpu_mask mask = mask_of(self->cpu);
        pthread_attr_setaffinity_np(&attributes, sizeof mask, mask.sets);
    }
    sigfillset(&all); /* signals are for the interpreter's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&self->thread, &attributes, live, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return failure;
}

/* The counters of members that run there. False: no memory. */
static bool open_arrivals(pw_team *team, const pw_place *places) {
    int n = team->n_members;
    pw_place *own = malloc(sizeof *own * (size_t)n);
    team->first = malloc(sizeof *team->first * (size_t)n);
    if (own && team->first) {
        for (int i = 0; i < n; ++i) {
            int cpu = team->members[i].cpu;
            own[i] = places ? places[i] : cpu >= 0 && n > 1 ? pw_place_of(cpu) : (pw_place){0, 0};
        }
        team->counters = pw_arrivals_open(n, own, team->first);
    }
    free(own);
    return team->counters;
}

static pw_team *allocate(int n_members, const int *cpus, const pw_place *places, int idle_spin_us) {
    pw_team *team = aligned_alloc(PW_LINE, sizeof *team);
    member *members = aligned_alloc(PW_LINE, sizeof(member) * (size_t)n_members);
    if (!team || !members) {
        free(team);
        free(members);
        return NULL;
    }
    memset(team, 0, sizeof *team);
    memset(members, 0, sizeof(member) * (size_t)n_members);
    for (int i = 0; i < n_members; ++i) {
        members[i].team = team;
        members[i].index = i;
        members[i].cpu = cpus ? cpus[i] : -1;
        atomic_init(&members[i].observed, -1);
    }
    team->members = members;
    team->n_members = n_members;
    team->n_started = 1;
    team->pinned = cpus != NULL;
    team->idle_spin_ns = (long)idle_spin_us * 1000;
    team->process = getpid();
    if (!open_arrivals(team, places)) {
        free(team->first);
        free(members);
        free(team);
        return NULL;
    }
    pthread_mutex_init(&team->one_task, NULL);
    return team;
}

pw_team *pw_team_open(int n_members, const int *cpus, const pw_place *places, int idle_spin_us, char *message,
                      size_t bytes) {
    if (n_members < 1 || n_members > MAX_CPUS) {
        snprintf(message, bytes, "a thread team has 1 to %d members, not %d", MAX_CPUS, n_members);
        return NULL;
    }
    if (cpus && !check_cpus(n_members, cpus, message, bytes)) return NULL;
    pw_team *team = allocate(n_members, cpus, places, idle_spin_us);
    if (!team) {
        snprintf(message, bytes, "no memory for a team of %d threads", n_members);
        return NULL;
    }
    for (; team->n_started < n_members; team->n_started += 1) {
        int failure = start_member(&team->members[team->n_started]);
        if (!failure) continue;
        snprintf(message, bytes, "cannot start thread %d of %d: %s", team->n_started + 1, n_members, strerror(failure));
        pw_team_close(team);
        return NULL;
    }
    return team;
}

void pw_team_close(pw_team *team) {
    if (!team) return;
    if (getpid() == team->process) {
        pthread_mutex_lock(&team->one_task);
        team->closing = true;
        advance(&team->epoch);
        for (int i = 1; i < team->n_started; ++i) pthread_join(team->members[i].thread, NULL);
        pthread_mutex_unlock(&team->one_task);
        return_thread(team->caller);
    }
    pthread_mutex_destroy(&team->one_task);
    free(team->counters);
    free(team->first);
    free(team->ends);
    free(team->members);
    free(team);
}
