/* What cores share that no table of the firmware says: how long a cache line takes from one to another, and how much
 * of its reading each keeps while others read. Both run on a team and end by a deadline, whatever the host does. */
#ifndef PHASEWISE_PROBE_H
#define PHASEWISE_PROBE_H

#include "team/team.h"

#include <stdbool.h>
#include <stdint.h>

/* Members 0 and 1 hand one line back and forth, `trips` times there and back in each of `rounds` rounds.
 * one_way_ns[round]: half of a mean round trip. Returns the rounds done before timeout_ns went by: 0 where a member
 * was never there. A negative number is the team's refusal (PW_TEAM_*). */
int pw_probe_pass(pw_team *team, int rounds, int trips, long timeout_ns, double *one_way_ns);

/* All members multiply and add for duration_ns, at once. operations_per_s[member]: what each did. */
int pw_probe_pace(pw_team *team, long duration_ns, double *operations_per_s);

typedef struct pw_readers pw_readers;

/* A buffer of `bytes` (whole mebibytes) for every member, touched by it. NULL where there is no memory, or the team
 * refuses; the team must outlive the readers. */
pw_readers *pw_readers_open(pw_team *team, int64_t bytes);

/* The members that are `active` stream through their buffers for duration_ns, all at once.
 * bytes_per_s[member]: what each read; 0 for the others. */
int pw_readers_run(pw_readers *readers, const bool *active, long duration_ns, double *bytes_per_s);

void pw_readers_close(pw_readers *readers);

#endif
