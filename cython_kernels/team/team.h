/* A team of threads that run one task together: one thread per core of a plan, pinned.
 *
 * The thread that calls pw_team_run takes part as member 0. It is pinned on its first call and stays pinned until the
 * last team that borrowed it is closed; its former affinity is then restored. Between tasks the other members spin for
 * a bounded time and then sleep on a futex, so an idle team costs nothing.
 *
 * A team belongs to the process that opened it: threads do not survive fork(), so in a child pw_team_run fails and
 * pw_team_close only frees memory. */
#ifndef PW_TEAM_H
#define PW_TEAM_H

#include <stddef.h>

typedef struct pw_team pw_team;
typedef void (*pw_task)(void *context, int member);

enum { PW_TEAM_OK = 0, PW_TEAM_FORKED = -1, PW_TEAM_UNPINNABLE = -2, PW_TEAM_NO_MEMORY = -3 };

/* cpus: n_members distinct CPU numbers, or NULL for threads that the kernel may move (tests, odd sandboxes).
 * Returns NULL and fills `message` when a CPU is named twice, cannot be pinned to, or a thread cannot be started. */
pw_team *pw_team_open(int n_members, const int *cpus, int idle_spin_us, char *message, size_t message_bytes);

/* Runs task(context, member) on every member and returns when all have finished. Calls are serialised. */
int pw_team_run(pw_team *team, pw_task task, void *context);

/* Inside a task: returns when every member has arrived. Writes before it are visible to all after it. */
void pw_team_barrier(pw_team *team, int member);

/* The same; the member that arrives last calls meet(context) before any goes on: what it waits for, all have waited for. */
void pw_team_barrier_beyond(pw_team *team, int member, void (*meet)(void *context), void *context);

int pw_team_size(const pw_team *team);

/* The CPU each member was last seen on, during a task; -1 before the first. */
void pw_team_observed(const pw_team *team, int *cpus);

/* How many times a member was seen on another CPU than its own. */
long pw_team_misplaced(const pw_team *team);

/* Sends idle members to sleep at once, because another team is about to use their cores. */
void pw_team_rest(pw_team *team);

void pw_team_close(pw_team *team);

#endif
