/* Ranks that are threads of one process, so that the sanitisers see what they do to one another: all-reduces of every
 * kind, one into the next, then a group that fails while the others wait. Prints nothing and returns 0, or ends with
 * a sanitiser's report, or 1 where a sum is wrong.    group_threads RANKS FLOATS TURNS */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "dispatch.h"
#include "group/group.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_RANKS = 16 };

static pw_group *group;
static float *buffers[MOST_RANKS];
static int n_ranks, turns;
static int64_t floats;
static atomic_int finished; /* ranks that have all their sums */

static void add_up(const pw_sum *sum, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        float total = sum->parts[0][i];
        for (int part = 1; part < sum->n_parts; ++part) total += sum->parts[part][i];
        for (int out = 0; out < sum->n_outs; ++out) sum->outs[out][i] = total;
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

static void reduce(int rank, int turn) {
    float *own = buffers[rank];
    for (int64_t i = 0; i < floats; ++i) own[i] = term(rank, turn, i);
    if ((rank + turn) % 3 == 0) sched_yield();
    int status = pw_all_reduce(group, rank, n_ranks, buffers, floats, (pw_all_reduce_kind)(turn % PW_ALL_REDUCE_KINDS),
                               PW_GROUP_FOREVER);
    demand(status == PW_GROUP_OK, "an all-reduce failed");
    for (int64_t i = 0; i < floats; ++i) {
        float wanted = 0; /* small whole numbers: exact in any order */
        for (int other = 0; other < n_ranks; ++other) wanted += term(other, turn, i);
        demand(own[i] == wanted, "a sum is wrong");
    }
}

static void *live(void *number) {
    int rank = (int)(intptr_t)number;
    uint32_t rung = 0;
    for (int turn = 0; turn < turns; ++turn) reduce(rank, turn);
    atomic_fetch_add(&finished, 1);
    if (rank == n_ranks - 1) {
        while (atomic_load(&finished) < n_ranks) sched_yield();
        pw_group_fail(group);
    } else {
        int status = rank == 0 ? pw_group_wait_bell(group, rank, 0, 0, PW_GROUP_FOREVER, &rung)
                               : pw_group_barrier(group, rank, n_ranks, PW_GROUP_FOREVER);
        demand(status == PW_GROUP_FAILED, "a wait did not end with the group");
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[MOST_RANKS];
    demand(argc == 4, "group_threads RANKS FLOATS TURNS");
    n_ranks = atoi(argv[1]);
    floats = atol(argv[2]);
    turns = atoi(argv[3]);
    group = aligned_alloc(PW_GROUP_ALIGNMENT, (size_t)pw_group_bytes(n_ranks)); /* exactly: beyond it is an error */
    pw_group_init(group, n_ranks);
    for (int rank = 0; rank < n_ranks; ++rank) buffers[rank] = malloc(sizeof(float) * (size_t)floats);
    for (int rank = 0; rank < n_ranks; ++rank) pthread_create(&threads[rank], NULL, live, (void *)(intptr_t)rank);
    for (int rank = 0; rank < n_ranks; ++rank) pthread_join(threads[rank], NULL);
    for (int rank = 0; rank < n_ranks; ++rank) free(buffers[rank]);
    free(group);
    return 0;
}
