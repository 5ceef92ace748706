/* The outcome of a check of a user's function. */
#ifndef PHASEWISE_USER_SLOTS_VERDICT_H
#define PHASEWISE_USER_SLOTS_VERDICT_H

#include <stdint.h>

typedef enum {
    PW_SLOT_AGREES,
    PW_SLOT_DIFFERS,       /* other bits than the built-in function's */
    PW_SLOT_REPEATS,       /* other bits for the same row later */
    PW_SLOT_WRITES_BEYOND, /* memory beside y is changed */
    PW_SLOT_CHANGES_MODES, /* rounding, subnormals, masks of exceptions, direction of strings */
    PW_SLOT_FAULTS,        /* a page that it was not given, or an instruction that is none */
    PW_SLOT_IS_LATE,
    PW_SLOT_THREADS_DIFFER,
    PW_SLOT_NO_MEMORY,
} pw_slot_outcome;

/* Memory that a child process shares with its parent, so that a verdict outlives it. */
typedef struct {
    int32_t outcome, signal;
    int32_t trial;   /* which of the ways to call: pw_slot_trial_name */
    int64_t n, index;
    uint64_t digest; /* of all that the built-in function gave, where the whole check was run */
} pw_slot_verdict;

const char *pw_slot_trial_name(int trial);

#endif
