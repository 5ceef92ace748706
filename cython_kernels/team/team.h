/* A team of threads that run one task together: one thread per core of a plan, pinned.
 *
 * The thread that calls pw_team_run takes part as member 0. It is pinned on its first call and stays pinned until the
 * last team that borrowed it is closed; its former affinity is then restored, or that which somebody else has given it
 * meanwhile (taskset). Between tasks the other members spin for a bounded time and then sleep on a futex, so an idle
 * team costs nothing. A CPU that goes away while a team is open stops nothing: its thread runs wherever the kernel puts
 * it.
 *
 * A team belongs to the process that opened it: threads do not survive fork(), so in a child pw_team_run fails and
 * pw_team_close only frees memory. */
#ifndef PW_TEAM_H
#define PW_TEAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "team/arrivals.h"

typedef struct pw_team pw_team;
typedef void (*pw_task)(void *context, int member);

enum { PW_TEAM_OK = 0, PW_TEAM_FORKED = -1, PW_TEAM_NO_MEMORY = -2 };

/* cpus: n_members distinct CPU numbers, or NULL for threads that the kernel may move (tests, odd sandboxes).
 * places: where each member runs, by which they meet (arrivals.h); NULL: as the system says of the CPUs.
 * Returns NULL and fills `message` when a CPU is named twice, cannot be pinned to, or a thread cannot be started. */
pw_team *pw_team_open(int n_members, const int *cpus, const pw_place *places, int idle_spin_us, char *message,
                      size_t message_bytes);

/* Runs task(context, member) on every member and returns when all have finished. Calls are serialised. */
int pw_team_run(pw_team *team, pw_task task, void *context);

/* Inside a task: returns when every member has arrived. Writes before it are visible to all after it. */
void pw_team_barrier(pw_team *team, int member);

/* The same; the member that arrives last calls meet(context) before any goes on: what it waits for, all have waited for. */
void pw_team_barrier_beyond(pw_team *team, int member, void (*meet)(void *context), void *context);

int pw_team_size(const pw_team *team);

/* How many arrivals of one barrier may find the counter's line in another node's caches. */
int pw_team_crossings(const pw_team *team);

/* Barriers that the team has passed since it was opened; wraps. */
unsigned pw_team_passed(const pw_team *team);

/* How much of a product each member shall have, in proportion: positive numbers, of products that memory limits and of
 * others. NULL: all have the same. While no task runs. No result depends on it. */
int pw_team_weigh(pw_team *team, const int *streaming, const int *computing);

/* What members before each one have, and last what all have, of weights; NULL: all have the same. */
const int64_t *pw_team_ends(const pw_team *team, bool streaming);

/* The CPU each member was last seen on, during a task; -1 before the first. */
void pw_team_observed(const pw_team *team, int *cpus);

/* How many times a member was seen on another CPU than its own. */
long pw_team_misplaced(const pw_team *team);

/* Sends idle members to sleep at once, because another team is about to use their cores. */
void pw_team_rest(pw_team *team);

void pw_team_close(pw_team *team);

#endif
