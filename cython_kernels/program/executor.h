/* Runs steps of a sealed program on a thread team. A step is checked before any pointer moves. */
#ifndef PHASEWISE_EXECUTOR_H
#define PHASEWISE_EXECUTOR_H

#include "program/run.h"

/* NULL, or what is wrong with program->step; completes the step for a team of `threads` and a table of schedules. */
const char *pw_program_check(pw_program *program, int threads, int32_t table);

/* Runs this rank's share of the checked step by a table of schedules; logits are then in the arena. PW_TEAM_OK, the
 * team's failure, PW_RUN_GROUP_FAILED or PW_RUN_LATE (some rank did not come to a barrier in time). */
int pw_program_run(pw_program *program, pw_team *team, int32_t table);

#endif
