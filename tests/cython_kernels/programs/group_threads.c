/* Ranks that are threads of one process, so that the sanitisers see what they do to one another: sums between barriers,
 * then a group that fails while the others wait. Prints nothing and returns 0, or ends with a sanitiser's report, or 1
 * where a sum is wrong.    group_threads RANKS TURNS */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "group/group.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_RANKS = 16 };

static pw_group *group;
static long terms[MOST_RANKS]; /* of each rank, in this turn; plain memory */
static int n_ranks, turns;
static atomic_int finished; /* ranks that have all their sums */

static void demand(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void meet(int rank) {
    demand(pw_group_barrier(group, rank, n_ranks, PW_GROUP_FOREVER) == PW_GROUP_OK, "a barrier failed");
}

static void add_up(int rank, int turn) {
    long sum = 0, wanted = 0;
    terms[rank] = (rank + 1L) * (turn + 1);
    if ((rank + turn) % 3 == 0) sched_yield();
    meet(rank);
    for (int other = 0; other < n_ranks; ++other) {
        sum += terms[other];
        wanted += (other + 1L) * (turn + 1);
    }
    demand(sum == wanted, "a sum is wrong");
    meet(rank);
}

static void *live(void *number) {
    int rank = (int)(intptr_t)number;
    uint32_t rung = 0;
    for (int turn = 0; turn < turns; ++turn) add_up(rank, turn);
    atomic_fetch_add(&finished, 1);
    if (rank == n_ranks - 1) {
        while (atomic_load(&finished) < n_ranks) sched_yield();
        pw_group_fail(group);
        return NULL;
    }
    int status = rank == 0 ? pw_group_wait_bell(group, rank, 0, 0, PW_GROUP_FOREVER, &rung)
                           : pw_group_barrier(group, rank, n_ranks, PW_GROUP_FOREVER);
    demand(status == PW_GROUP_FAILED, "a wait did not end with the group");
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[MOST_RANKS];
    demand(argc == 3, "group_threads RANKS TURNS");
    n_ranks = atoi(argv[1]);
    turns = atoi(argv[2]);
    group = aligned_alloc(PW_GROUP_ALIGNMENT, (size_t)pw_group_bytes(n_ranks)); /* exactly: beyond it is an error */
    pw_group_init(group, n_ranks);
    for (int rank = 0; rank < n_ranks; ++rank) pthread_create(&threads[rank], NULL, live, (void *)(intptr_t)rank);
    for (int rank = 0; rank < n_ranks; ++rank) pthread_join(threads[rank], NULL);
    free(group);
    return 0;
}
