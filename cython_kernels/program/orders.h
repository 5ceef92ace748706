/* What rank 0 tells the other ranks of a program, in the memory that they share.
 *
 * Every rank has a letter box and a bell (group.h). Rank 0 writes a step where all can read it, puts an order into the
 * boxes of those who take part, rings, and runs its own share; no process reads a step that is being written, because its
 * last barrier comes before the next one. An order is taken out of its box once, so that a ring too many does nothing. */
#ifndef PHASEWISE_ORDERS_H
#define PHASEWISE_ORDERS_H

#include "program/executor.h"

/* What pw_orders_serve ends with, beside failures of a run. */
enum { PW_SERVED = 0, PW_SERVE_ORPHANED = -30 };

/* By rank 0 once it has sealed the memory, before others look; they ask before they seal it whether it was rank 0 of
 * the same program. */
void pw_orders_open(pw_program *program);
bool pw_orders_fit(const pw_program *program, const char *shared);

/* Rank 0's: the checked step, run by all ranks of a table. A failure is everybody's. `resting`: a team to send to rest
 * once the others are on their way, or NULL. */
int pw_orders_run(pw_program *program, pw_team *team, int32_t table, pw_team *resting);

/* Rank 0's: every pw_orders_serve returns. */
void pw_orders_stop(pw_program *program);

/* Any other rank's: runs what it is told to, until it is told to stop, the group fails or rank 0's process has ended.
 * teams: for each table, NULL where the rank takes no part. PW_SERVED, PW_SERVE_ORPHANED, or a run's failure. */
int pw_orders_serve(pw_program *program, pw_team *const *teams);

/* The CPUs that a rank's threads were last seen on by a table (-1 before), and how often they were elsewhere than told. */
const int32_t *pw_orders_observed(const pw_program *program, int32_t table, int32_t rank);
int64_t pw_orders_misplaced(const pw_program *program, int32_t table, int32_t rank);

#endif
