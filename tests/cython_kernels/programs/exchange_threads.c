/* Ranks that are threads of one process, so that the sanitisers see what they do to one another in the slots of an
 * exchange: collectives of all kinds and of drawn lengths, one into the next. Prints nothing and returns 0, or ends with
 * a sanitiser's report, or 1 where a result is wrong.    exchange_threads RANKS SLOT_BYTES TURNS */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "dispatch.h"
#include "group/exchange.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_RANKS = 16, MOST_FLOATS = 9000 };

static pw_group *group;
static uint8_t *slots;
static int n_ranks, turns;
static atomic_int finished; /* ranks that have made all their calls */
static int64_t slot_bytes;

static void add_up(int n_parts, const float *const *parts, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) {
        float total = parts[0][i];
        for (int part = 1; part < n_parts; ++part) total += parts[part][i];
        out[i] = total;
    }
}

const pw_kernels *pw_active(void) {
    static const pw_kernels kernels = {.ops = {.sum = add_up}};
    return &kernels;
}

static void demand(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static float term(int rank, int turn, int64_t i) { return (float)((rank + 1) * (turn + 1) + i % 7); }

static void reduce(pw_exchange *x, int turn, int64_t n, float *data) {
    demand(pw_exchange_all_reduce(x, PW_ADDS_F32, n, data, PW_GROUP_FOREVER) == PW_GROUP_OK, "an all-reduce failed");
    for (int64_t i = 0; i < n; ++i) {
        float wanted = 0; /* small whole numbers: exact in any order */
        for (int other = 0; other < n_ranks; ++other) wanted += term(other, turn, i);
        demand(data[i] == wanted, "a sum is wrong");
    }
}

static void gather(pw_exchange *x, int turn, int64_t n, const float *data) {
    void *outs[MOST_RANKS];
    size_t bytes = sizeof(float) * (size_t)n;
    for (int rank = 0; rank < n_ranks; ++rank) outs[rank] = malloc(bytes + 1);
    demand(pw_exchange_all_gather(x, (int64_t)bytes, data, outs, PW_GROUP_FOREVER) == PW_GROUP_OK, "a gather failed");
    for (int rank = 0; rank < n_ranks; ++rank) {
        const float *out = outs[rank];
        for (int64_t i = 0; i < n; ++i) demand(out[i] == term(rank, turn, i), "a gathered message is wrong");
        free(outs[rank]);
    }
}

static void broadcast(pw_exchange *x, int turn, int64_t n, float *data) {
    int root = turn % n_ranks;
    int status = pw_exchange_broadcast(x, root, (int64_t)sizeof(float) * n, data, PW_GROUP_FOREVER);
    demand(status == PW_GROUP_OK, "a broadcast failed");
    for (int64_t i = 0; i < n; ++i) demand(data[i] == term(root, turn, i), "a broadcast message is wrong");
}

/* The last rank fails the group while the others wait, for a bell or in a barrier. */
static void fail_last(int rank) {
    uint32_t rung = 0;
    atomic_fetch_add(&finished, 1);
    if (rank == n_ranks - 1) {
        while (atomic_load(&finished) < n_ranks) sched_yield();
        pw_group_fail(group);
        return;
    }
    int status = rank == 0 ? pw_group_wait_bell(group, rank, 0, 0, PW_GROUP_FOREVER, &rung)
                           : pw_group_barrier(group, rank, n_ranks, PW_GROUP_FOREVER);
    demand(status == PW_GROUP_FAILED, "a wait did not end with the group");
}

static void *live(void *number) {
    int rank = (int)(intptr_t)number;
    pw_exchange x = {.group = group, .slots = slots, .slot_bytes = slot_bytes, .rank = rank, .n_ranks = n_ranks};
    unsigned shared = 5, own = (unsigned)rank;
    for (int turn = 0; turn < turns; ++turn) {
        int kind = rand_r(&shared) % 4;
        int64_t n = rand_r(&shared) % (rand_r(&shared) % 3 ? 300 : MOST_FLOATS);
        float *data = malloc(sizeof(float) * (size_t)n + 1); /* exactly: beyond it is an error */
        for (int64_t i = 0; i < n; ++i) data[i] = term(rank, turn, i);
        if (rand_r(&own) % 3 == 0) sched_yield();
        if (kind == 0) reduce(&x, turn, n, data);
        if (kind == 1) gather(&x, turn, n, data);
        if (kind == 2) broadcast(&x, turn, n, data);
        if (kind == 3) demand(pw_exchange_barrier(&x, PW_GROUP_FOREVER) == PW_GROUP_OK, "a barrier failed");
        free(data);
    }
    fail_last(rank);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[MOST_RANKS];
    demand(argc == 4, "exchange_threads RANKS SLOT_BYTES TURNS");
    n_ranks = atoi(argv[1]);
    slot_bytes = atol(argv[2]);
    turns = atoi(argv[3]);
    group = aligned_alloc(PW_GROUP_ALIGNMENT, (size_t)pw_group_bytes(n_ranks));
    slots = aligned_alloc(PW_EXCHANGE_LINE, (size_t)pw_exchange_slots_bytes(n_ranks, slot_bytes));
    pw_group_init(group, n_ranks);
    for (int rank = 0; rank < n_ranks; ++rank) pthread_create(&threads[rank], NULL, live, (void *)(intptr_t)rank);
    for (int rank = 0; rank < n_ranks; ++rank) pthread_join(threads[rank], NULL);
    free(slots);
    free(group);
    return 0;
}
