/* A process group in shared memory: ranks that wait for one another.
 *
 * The group is a region that every rank maps, each at an address of its own: it holds no pointers and no locks, so a
 * rank may be killed at any point. Waiting is bounded: a rank spins for a short time, then sleeps on a futex that is
 * shared between processes, until what it waits for has happened, the group has failed, or its time is over.
 *
 * One thread of a rank waits at a time. Ranks are numbered 0..ranks - 1; 0..n - 1 of them take part in a
 * barrier over n, and different n do not disturb one another. Nothing counts a rank's processes: the threads of
 * several processes may as well be the ranks of one group. */
#ifndef PHASEWISE_GROUP_H
#define PHASEWISE_GROUP_H

#include <stdint.h>

typedef struct pw_group pw_group;

enum {
    PW_GROUP_OK = 0,
    PW_GROUP_FAILED = -1, /* some rank called pw_group_fail, or was late: the group is of no more use */
    PW_GROUP_LATE = -2,   /* this rank waited for timeout_ns */
};

enum {
    PW_GROUP_MAX_RANKS = 256,
    PW_GROUP_ALIGNMENT = 128, /* of the region, and what pw_group_bytes is a multiple of */
};

#define PW_GROUP_FOREVER (-1L) /* as timeout_ns: only what is awaited, or failure, ends the wait */

/* Bytes of a group of 1 <= ranks <= PW_GROUP_MAX_RANKS. */
int64_t pw_group_bytes(int ranks);

/* Makes a region an unused group. One process calls it, before any other opens the region. */
void pw_group_init(pw_group *group, int ranks);

/* The number of ranks that the group was made for; 0 if it was not made. */
int pw_group_ranks(const pw_group *group);

/* ---- waiting for all ------------------------------------------------------------------------------------------- */

/* Returns when ranks 0..n_ranks - 1 have all called it. Writes before it are visible to all after it.
 * A rank that is late has already been counted, which cannot be taken back: it fails the group for all others. */
int pw_group_barrier(pw_group *group, int rank, int n_ranks, long timeout_ns);

/* How often this rank has arrived among n_ranks so far. */
uint32_t pw_group_arrivals(const pw_group *group, int rank, int n_ranks);

/* ---- waiting to be told ---------------------------------------------------------------------------------------- */

/* Wakes that rank's pw_group_wait_bell; also one that is called later, with the former number as `seen`. */
void pw_group_ring(pw_group *group, int rank);

/* How often that rank's bell was rung. */
uint32_t pw_group_bell(const pw_group *group, int rank);

/* Returns once the rank's bell was rung more than `seen` times, and how often in *now. LATE does not fail the group.
 * spin_ns: how long to spin before sleeping; 0 where another wait will use this core. */
int pw_group_wait_bell(pw_group *group, int rank, uint32_t seen, long spin_ns, long timeout_ns, uint32_t *now);

/* ---- failing --------------------------------------------------------------------------------------------------- */

/* Every wait of every rank ends at once with PW_GROUP_FAILED, now and later. By anyone who maps the group. */
void pw_group_fail(pw_group *group);

int pw_group_failed(const pw_group *group);

#endif
