/* Rates of a team's members while all of them read or compute at once. Each run ends by a deadline. */
#ifndef PHASEWISE_PROBE_H
#define PHASEWISE_PROBE_H

#include "team/team.h"

#include <stdbool.h>
#include <stdint.h>

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
