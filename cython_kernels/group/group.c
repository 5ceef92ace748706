/* How the ranks of a group wait.
 *
 * Every rank has a place of its own in the region, which no other rank writes but to wake it, to ring its bell or to
 * fail the group. There it counts its arrivals, one counter for each number of ranks that may take part. To arrive is
 * to add one; a barrier is passed when the counters of all ranks have come as far as one's own. Counters only grow, so
 * that a rank which is a barrier ahead disturbs no other, and nothing has to be reset.
 *
 * A rank that goes to sleep first says for whom, then looks once more at what it waits for; a rank that arrives first
 * counts, then looks who sleeps for it. Both in one order for all (sequential consistency), so one of the two sees the
 * other. Failure turns the word that everybody sleeps on, whatever they sleep for. */
#define _GNU_SOURCE
#include "group/group.h"
#include "team/waiting.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    LOOKS_PER_GLANCE = 64,     /* at what is awaited, for one at the clock */
    SPIN_NS = 200000,          /* longer, and the host took a CPU away or the shares were uneven: sleep */
    CROWDED_SPIN_NS = 2000,    /* with more ranks than CPUs, another rank needs this CPU */
};

enum { AWAKE = 0, FOR_BELL = -1 }; /* asleep: 1 + the rank whose arrival is awaited, or FOR_BELL */

/* Two cache lines and no fewer: processors fetch them in pairs. */
typedef struct {
    _Alignas(PW_GROUP_ALIGNMENT) atomic_uint alarm; /* what this rank sleeps on; one more wakes it */
    atomic_int asleep;
    atomic_uint bell;
    atomic_uint arrivals[]; /* [number of ranks that take part - 1] */
} place;

struct pw_group {
    _Alignas(PW_GROUP_ALIGNMENT) atomic_int ranks;
    atomic_int failed;
    int64_t spin_ns;
    int64_t place_bytes;
};

static int64_t place_bytes(int ranks) {
    int64_t bytes = (int64_t)offsetof(place, arrivals) + ranks * (int64_t)sizeof(atomic_uint);
    return (bytes + PW_GROUP_ALIGNMENT - 1) / PW_GROUP_ALIGNMENT * PW_GROUP_ALIGNMENT;
}

static place *place_of(const pw_group *group, int rank) {
    return (place *)((char *)group + sizeof(pw_group) + rank * group->place_bytes);
}

int64_t pw_group_bytes(int ranks) { return (int64_t)sizeof(pw_group) + ranks * place_bytes(ranks); }

void pw_group_init(pw_group *group, int ranks) {
    memset(group, 0, (size_t)pw_group_bytes(ranks));
    group->place_bytes = place_bytes(ranks);
    group->spin_ns = ranks > sysconf(_SC_NPROCESSORS_ONLN) ? CROWDED_SPIN_NS : SPIN_NS;
    atomic_store(&group->ranks, ranks);
}

int pw_group_ranks(const pw_group *group) { return atomic_load(&group->ranks); }

/* ---- spinning, then sleeping ------------------------------------------------------------------------------------ */

/* A counter that some rank raises, and what a sleeper for it calls itself. */
typedef struct {
    atomic_uint *counter;
    unsigned goal;
    int sleeper;
} event;

/* For how long a rank waits, over all that it waits for in turn; start_ns 0: it has not had to wait yet. */
typedef struct {
    long spin_ns, timeout_ns, start_ns;
} patience;

enum { STILL_WAITING = 1 };

/* Counters may wrap: those that are compared are never half their range apart. */
static int look(pw_group *group, const event *awaited) {
    if (atomic_load(&group->failed)) return PW_GROUP_FAILED;
    return (int)(atomic_load(awaited->counter) - awaited->goal) >= 0 ? PW_GROUP_OK : STILL_WAITING;
}

static int spin(pw_group *group, const event *awaited, const patience *patience) {
    do {
        for (int i = 0; i < LOOKS_PER_GLANCE; ++i) {
            int status = look(group, awaited);
            if (status != STILL_WAITING) return status;
            relax();
        }
    } while (now_ns() - patience->start_ns < patience->spin_ns);
    return STILL_WAITING;
}

/* The kernel compares `alarm` once more before it lets anybody sleep. */
static void doze(place *self, unsigned alarm, long ns) {
    struct timespec rest = {.tv_sec = ns / 1000000000L, .tv_nsec = ns % 1000000000L};
    syscall(SYS_futex, &self->alarm, FUTEX_WAIT, alarm, ns == LONG_MAX ? NULL : &rest, NULL, 0);
}

static void wake(place *sleeper) {
    atomic_fetch_add(&sleeper->alarm, 1);
    syscall(SYS_futex, &sleeper->alarm, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static int sleep_until(pw_group *group, place *self, const event *awaited, const patience *patience) {
    atomic_store(&self->asleep, awaited->sleeper);
    int status;
    for (;;) {
        unsigned alarm = atomic_load(&self->alarm);
        status = look(group, awaited);
        if (status != STILL_WAITING) break;
        long left_ns = patience->timeout_ns < 0 ? LONG_MAX : patience->start_ns + patience->timeout_ns - now_ns();
        if (left_ns <= 0) {
            status = PW_GROUP_LATE;
            break;
        }
        doze(self, alarm, left_ns);
    }
    atomic_store(&self->asleep, AWAKE);
    return status;
}

static int wait_for(pw_group *group, int rank, const event *awaited, patience *patience) {
    int status = look(group, awaited);
    if (status != STILL_WAITING) return status;
    if (patience->start_ns == 0) patience->start_ns = now_ns();
    if (patience->spin_ns > 0) status = spin(group, awaited, patience);
    if (status != STILL_WAITING) return status;
    return sleep_until(group, place_of(group, rank), awaited, patience);
}

/* How long to spin where the whole wait may last timeout_ns. */
static patience bounded(long spin_ns, long timeout_ns) {
    bool longer = timeout_ns >= 0 && timeout_ns < spin_ns;
    return (patience){.spin_ns = longer ? timeout_ns : spin_ns, .timeout_ns = timeout_ns};
}

/* ---- arriving --------------------------------------------------------------------------------------------------- */

static uint32_t arrive(pw_group *group, int rank, int n_ranks) {
    unsigned arrivals = atomic_fetch_add(&place_of(group, rank)->arrivals[n_ranks - 1], 1) + 1;
    for (int i = 1; i < n_ranks; ++i) {
        place *other = place_of(group, (rank + i) % n_ranks);
        if (atomic_load(&other->asleep) == 1 + rank) wake(other);
    }
    return arrivals;
}

uint32_t pw_group_arrivals(const pw_group *group, int rank, int n_ranks) {
    return atomic_load(&place_of(group, rank)->arrivals[n_ranks - 1]);
}

/* Waits until rank `awaited` has reached `arrivals`. Our own arrival is counted, so a timeout fails the group. */
static int await_rank(pw_group *group, int rank, int n_ranks, int awaited, uint32_t arrivals, patience *patience) {
    event arrival = {&place_of(group, awaited)->arrivals[n_ranks - 1], arrivals, 1 + awaited};
    int status = wait_for(group, rank, &arrival, patience);
    if (status == PW_GROUP_LATE) pw_group_fail(group);
    return status;
}

int pw_group_barrier(pw_group *group, int rank, int n_ranks, long timeout_ns) {
    if (pw_group_failed(group)) return PW_GROUP_FAILED;
    patience patience = bounded(group->spin_ns, timeout_ns);
    uint32_t arrivals = arrive(group, rank, n_ranks);
    for (int i = 1; i < n_ranks; ++i) {
        int status = await_rank(group, rank, n_ranks, (rank + i) % n_ranks, arrivals, &patience);
        if (status != PW_GROUP_OK) return status;
    }
    return PW_GROUP_OK;
}

/* ---- bells and failure ------------------------------------------------------------------------------------------ */

void pw_group_ring(pw_group *group, int rank) {
    place *called = place_of(group, rank);
    atomic_fetch_add(&called->bell, 1);
    if (atomic_load(&called->asleep) == FOR_BELL) wake(called);
}

uint32_t pw_group_bell(const pw_group *group, int rank) { return atomic_load(&place_of(group, rank)->bell); }

int pw_group_wait_bell(pw_group *group, int rank, uint32_t seen, long spin_ns, long timeout_ns, uint32_t *now) {
    place *self = place_of(group, rank);
    event rung = {&self->bell, seen + 1, FOR_BELL};
    patience patience = bounded(spin_ns, timeout_ns);
    int status = wait_for(group, rank, &rung, &patience);
    *now = atomic_load(&self->bell);
    return status;
}

void pw_group_fail(pw_group *group) {
    int ranks = pw_group_ranks(group);
    atomic_store(&group->failed, 1);
    for (int rank = 0; rank < ranks; ++rank) wake(place_of(group, rank));
}

int pw_group_failed(const pw_group *group) { return atomic_load(&group->failed); }
