/* Walks through every interleaving of group.c, the very file, for two or three ranks.
 *
 * Ranks are coroutines. Every access to shared memory (atomic operations, chunks of the message, the futex) is a point
 * at which any other rank may go on, be killed, or run out of time. A state is everything that the ranks have in common
 * and everything on their stacks; states that were met before are not walked through again, so waiting in circles ends.
 * Accesses happen one after another: what processors reorder is left to the stress tests. For x86-64, whose registers
 * it knows.
 *
 *   group_model SCENARIO RANKS   prints the number of states, or what went wrong and the turns before it.
 *
 * Scenarios: reduce (sums of messages between barriers, two in turn), kill (one rank stops for good anywhere), late
 * (one wait is over anywhere), fail (somebody fails the group anywhere), mixed (barriers over two and over all), bell;
 * kill, late and fail have one sum. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static void point(const volatile void *touched);
static long model_futex(atomic_uint *word, int operation, unsigned value, const struct timespec *timeout);
static int model_clock(struct timespec *now);

#undef atomic_load
#undef atomic_store
#undef atomic_fetch_add
#define atomic_load(p) (point(p), atomic_load_explicit(p, memory_order_seq_cst))
#define atomic_store(p, x) (point(p), atomic_store_explicit(p, x, memory_order_seq_cst))
#define atomic_fetch_add(p, x) (point(p), atomic_fetch_add_explicit(p, x, memory_order_seq_cst))
#define syscall(number, word, operation, value, timeout, other, last) model_futex(word, operation, value, timeout)
#define clock_gettime(clock, now) model_clock(now)
#include "group/group.c"

enum {
    MOST_RANKS = 3,
    GROUP_BYTES = 2048,
    STACK_BYTES = 16384,
    TABLE_SIZE = 1 << 24,
    DEEPEST = 100000,
};

#define TIMEOUT_NS 1000L
#define UNWRITTEN (-1e9f)

typedef enum { GOES_ON, DONE, KILLED } life;

/* Everything that a step may change, beside the stacks and registers. */
typedef struct {
    _Alignas(PW_GROUP_ALIGNMENT) char group[GROUP_BYTES];
    float message[MOST_RANKS][MOST_RANKS]; /* a chunk of each rank's message is one float here */
    atomic_uint *sleeps_on[MOST_RANKS];
    life life[MOST_RANKS];
    bool out_of_time[MOST_RANKS];
    int status[MOST_RANKS];
    int kills_left, delays_left;
} world;

static world now;
static char stacks[MOST_RANKS][STACK_BYTES] __attribute__((aligned(64)));
static ucontext_t scheduler, contexts[MOST_RANKS];
static int running, n_ranks, path[DEEPEST], depth;
static const char *scenario;
static bool nobody_fails;
static long n_states;

static bool playing(const char *name) { return strcmp(scenario, name) == 0; }

static pw_group *the_group(void) { return (pw_group *)now.group; }

static void broken(const char *law) {
    printf("%s %d: %s\nturns:", scenario, n_ranks, law);
    for (int i = 0; i < depth; ++i) printf(" %d", path[i]);
    printf("\n");
    exit(1);
}

/* ---- what the code under test calls ----------------------------------------------------------------------------- */

static void leave(void) { swapcontext(&contexts[running], &scheduler); }

/* Where nobody ever fails the group, nobody can tell when that was looked at; likewise for what init wrote. */
static void point(const volatile void *touched) {
    bool constant = touched == &the_group()->ranks || (touched == &the_group()->failed && nobody_fails);
    if (running >= 0 && !constant) leave();
}

static long model_futex(atomic_uint *word, int operation, unsigned value, const struct timespec *timeout) {
    (void)timeout; /* it ends by wake_late */
    point(word);
    if (operation == FUTEX_WAIT) {
        if (atomic_load_explicit(word, memory_order_seq_cst) != value) return -1;
        now.sleeps_on[running] = word;
        leave();
        return 0;
    }
    for (int rank = 0; rank < n_ranks; ++rank)
        if (now.sleeps_on[rank] == word) now.sleeps_on[rank] = NULL;
    return 0;
}

static int model_clock(struct timespec *now_s) {
    *now_s = (struct timespec){.tv_nsec = now.out_of_time[running] ? 2 * TIMEOUT_NS : 1};
    return 0;
}

/* ---- what a rank does ------------------------------------------------------------------------------------------- */

static float term(int turn, int rank) { return (float)(1 << (rank + MOST_RANKS * turn)); }

static void fill(int rank, float value) {
    point(now.message[rank]);
    for (int i = 0; i < n_ranks; ++i) now.message[rank][i] = value;
}

static void check_sum(int rank, int turn) {
    float wanted = 0;
    for (int other = 0; other < n_ranks; ++other) wanted += term(turn, other);
    point(now.message[rank]);
    for (int i = 0; i < n_ranks; ++i)
        if (now.message[rank][i] != wanted) broken("a rank has something else than the sum");
}

/* One chunk of all messages becomes their sum; for two ranks, every access is a point, else one for all reads and
 * one for all writes: fewer states. */
static void sum_chunk(int chunk) {
    float sum = 0;
    for (int other = 0; other < n_ranks; ++other) {
        if (other == 0 || n_ranks == 2) point(now.message[other]);
        sum += now.message[other][chunk];
    }
    for (int other = 0; other < n_ranks; ++other) {
        if (other == 0 || n_ranks == 2) point(now.message[other]);
        now.message[other][chunk] = sum;
    }
}

/* Sums, each between two barriers, and nothing between them: what a rank fills and reads, others may still be reading
 * or writing. */
static int reduce(int rank) {
    long timeout_ns = nobody_fails ? PW_GROUP_FOREVER : TIMEOUT_NS;
    for (int turn = 0; turn < (nobody_fails ? 2 : 1); ++turn) {
        fill(rank, term(turn, rank));
        int status = pw_group_barrier(the_group(), rank, n_ranks, timeout_ns);
        if (status != PW_GROUP_OK) return status;
        sum_chunk(rank);
        status = pw_group_barrier(the_group(), rank, n_ranks, timeout_ns);
        if (status != PW_GROUP_OK) return status;
        check_sum(rank, turn);
        fill(rank, UNWRITTEN);
    }
    return PW_GROUP_OK;
}

/* A barrier over ranks 0 and 1, then one over all. */
static int mixed(int rank) {
    for (int turn = 1; turn <= 2; ++turn) {
        int taking_part = turn == 2 ? n_ranks : 2;
        if (rank >= taking_part) continue;
        fill(rank, (float)turn);
        int status = pw_group_barrier(the_group(), rank, taking_part, PW_GROUP_FOREVER);
        if (status != PW_GROUP_OK) return status;
        for (int other = 0; other < taking_part; ++other) {
            point(now.message[other]);
            if (now.message[other][0] < (float)turn) broken("a rank passed a barrier before another had arrived");
        }
    }
    return PW_GROUP_OK;
}

/* Rank 0 rings the others, who answer; twice. */
static int bell(int rank) {
    uint32_t seen = 0;
    for (uint32_t turn = 0; turn < 2; ++turn) {
        for (int other = 1; other < n_ranks; ++other)
            if (rank == 0) pw_group_ring(the_group(), other);
        uint32_t calls = rank > 0 ? 1 : (uint32_t)n_ranks - 1;
        for (uint32_t goal = seen + calls; seen < goal;) {
            int status = pw_group_wait_bell(the_group(), rank, seen, 0, PW_GROUP_FOREVER, &seen);
            if (status != PW_GROUP_OK) return status;
        }
        if (rank > 0) pw_group_ring(the_group(), 0);
    }
    return PW_GROUP_OK;
}

static int fail(int rank) {
    if (rank < n_ranks - 1) return reduce(rank);
    point(NULL);
    pw_group_fail(the_group());
    return PW_GROUP_FAILED;
}

static void live(int rank) {
    int (*part)(int) = playing("mixed") ? mixed : playing("bell") ? bell : playing("fail") ? fail : reduce;
    now.status[rank] = part(rank);
    now.life[rank] = DONE;
    leave();
}

/* ---- walking ---------------------------------------------------------------------------------------------------- */

/* A copy of the world and of the stacks that are in use. */
typedef struct {
    world world;
    ucontext_t contexts[MOST_RANKS];
    char *stack[MOST_RANKS];
} snapshot;

static char *stack_top(int rank) { return (char *)contexts[rank].uc_mcontext.gregs[REG_RSP]; }

static size_t stack_used(int rank) { return (size_t)(stacks[rank] + STACK_BYTES - stack_top(rank)); }

static snapshot *take(void) {
    snapshot *s = malloc(sizeof *s);
    s->world = now;
    memcpy(s->contexts, contexts, sizeof contexts);
    for (int rank = 0; rank < n_ranks; ++rank) {
        s->stack[rank] = malloc(stack_used(rank));
        memcpy(s->stack[rank], stack_top(rank), stack_used(rank));
    }
    return s;
}

static void restore(const snapshot *s) {
    now = s->world;
    memcpy(contexts, s->contexts, sizeof contexts);
    for (int rank = 0; rank < n_ranks; ++rank) memcpy(stack_top(rank), s->stack[rank], stack_used(rank));
}

static void drop(snapshot *s) {
    for (int rank = 0; rank < n_ranks; ++rank) free(s->stack[rank]);
    free(s);
}

static uint64_t hashed(uint64_t hash, const void *bytes, size_t count) {
    const uint64_t *words = bytes;
    for (size_t i = 0; i < count / sizeof *words; ++i) {
        hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* Of a rank that goes on: its stack, and the registers that a call keeps. The others hold nothing by now. */
static uint64_t rank_hashed(uint64_t hash, int rank) {
    static const int kept[] = {REG_RSP, REG_RIP, REG_RBX, REG_RBP, REG_R12, REG_R13, REG_R14, REG_R15};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; ++i)
        hash = hashed(hash, &contexts[rank].uc_mcontext.gregs[kept[i]], sizeof(greg_t));
    return hashed(hash, stack_top(rank), stack_used(rank));
}

static uint64_t fingerprint(void) {
    uint64_t hash = hashed(1, &now, sizeof now);
    for (int rank = 0; rank < n_ranks; ++rank)
        if (now.life[rank] == GOES_ON) hash = rank_hashed(hash, rank);
    return hash | 1; /* 0 is an empty place */
}

/* Whether the present state is new; it is not afterwards. */
static bool is_new(void) {
    static uint64_t *table;
    if (!table) table = calloc(TABLE_SIZE, sizeof *table);
    uint64_t hash = fingerprint();
    uint64_t i = hash >> 32;
    for (;; ++i) {
        uint64_t *place = &table[i % TABLE_SIZE];
        if (*place == hash) return false;
        if (*place == 0) {
            *place = hash;
            if (++n_states > TABLE_SIZE / 2) broken("too many states to walk through");
            return true;
        }
    }
}

static void step(int rank) {
    running = rank;
    swapcontext(&scheduler, &contexts[rank]);
    running = -1;
}

static bool can_run(int rank) { return now.life[rank] == GOES_ON && !now.sleeps_on[rank]; }

static void wake_late(int rank) {
    now.out_of_time[rank] = true;
    now.sleeps_on[rank] = NULL;
}

static void walk(void);

static void walk_on(const snapshot *from, int turn) {
    if (depth == DEEPEST) broken("no end");
    path[depth++] = turn;
    if (is_new()) walk();
    depth -= 1;
    restore(from);
}

/* Nobody can go on: all are done, or those who sleep may do so only where somebody was killed and time ends it. */
static void check_end(void) {
    bool asleep = false;
    for (int rank = 0; rank < n_ranks; ++rank) asleep = asleep || now.life[rank] == GOES_ON;
    if (!asleep) {
        for (int rank = 0; rank < n_ranks; ++rank)
            if (now.status[rank] != PW_GROUP_OK && nobody_fails)
                broken("a wait failed although nobody did");
        return;
    }
    if (!playing("kill")) broken("a rank sleeps for ever");
    for (int rank = 0; rank < n_ranks; ++rank)
        if (now.sleeps_on[rank]) wake_late(rank);
    if (is_new()) walk();
}

static void walk(void) {
    snapshot *here = take();
    bool stuck = true;
    for (int rank = 0; rank < n_ranks; ++rank) {
        if (can_run(rank)) {
            stuck = false;
            step(rank);
            walk_on(here, rank);
        }
        if (now.sleeps_on[rank] && now.delays_left > 0) {
            now.delays_left -= 1;
            wake_late(rank);
            walk_on(here, 10 + rank);
        }
        if (now.life[rank] == GOES_ON && now.kills_left > 0) {
            now.kills_left -= 1;
            now.life[rank] = KILLED;
            now.sleeps_on[rank] = NULL;
            walk_on(here, 20 + rank);
        }
    }
    if (stuck) check_end();
    restore(here);
    drop(here);
}

static void begin(void) {
    running = -1;
    nobody_fails = !playing("kill") && !playing("late") && !playing("fail");
    if (pw_group_bytes(n_ranks) > GROUP_BYTES) broken("the group does not fit into the model");
    pw_group_init(the_group(), n_ranks);
    the_group()->spin_ns = 0; /* to spin is to look again, which every order of turns does anyway */
    now.kills_left = playing("kill");
    now.delays_left = playing("late");
    for (int rank = 0; rank < n_ranks; ++rank) {
        fill(rank, UNWRITTEN);
        getcontext(&contexts[rank]);
        contexts[rank].uc_stack.ss_sp = stacks[rank];
        contexts[rank].uc_stack.ss_size = STACK_BYTES;
        makecontext(&contexts[rank], (void (*)(void))live, 1, rank);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    scenario = argv[1];
    n_ranks = atoi(argv[2]);
    if (n_ranks < 2 || n_ranks > MOST_RANKS) return 2;
    begin();
    walk();
    printf("%ld states\n", n_states);
    return 0;
}
