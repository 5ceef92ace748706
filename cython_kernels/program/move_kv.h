/* Moving keys and values of a sealed program between steps. */
#ifndef PHASEWISE_MOVE_KV_H
#define PHASEWISE_MOVE_KV_H

#include "program/program.h"

/* Moves the keys and values of slots, every layer; ranges may overlap. The caller checks the ranges; one rank does it,
 * while no step runs. */
int pw_program_copy_kv(pw_program *program, pw_team *team, int64_t source, int64_t target, int64_t slots);

/* The same of states, whose places do not overlap. */
int pw_program_copy_states(pw_program *program, pw_team *team, int64_t source, int64_t target, int64_t places);

#endif
