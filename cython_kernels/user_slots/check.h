/* Compares a user's function with the built-in one of its slot, by the rules of contract.h. */
#ifndef PHASEWISE_USER_SLOTS_CHECK_H
#define PHASEWISE_USER_SLOTS_CHECK_H

#include "user_slots/user_slots.h"
#include "user_slots/verdict.h"

/* In a process of its own, which it may end: every length that is checked, in every way, between pages that cannot be touched;
 * then threads side by side; then, where `every_float`, each float32 there is as an input of an activation or a gate.
 * seconds: processor time, after which the process ends. The verdict says PW_SLOT_FAULTS while it runs. */
void pw_check_slot(int slot, pw_slot_function function, uint64_t seed, int every_float, int seconds,
                   pw_slot_verdict *verdict);

/* Some lengths in every way, in ordinary memory: what a process does before it uses a library that was checked here. */
void pw_recheck_slot(int slot, pw_slot_function function, uint64_t seed, pw_slot_verdict *verdict);

/* Nanoseconds of each loop of `calls` rounds over rows of these lengths; NULL: of the built-in function. Returns 0, or -1 where
 * there is no memory. */
int pw_time_slot(int slot, pw_slot_function function, const int64_t *lengths, int n_lengths, int64_t loops, int64_t calls,
                 int64_t *loop_ns);

#endif
