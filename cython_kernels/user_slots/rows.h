/* Rows to call a slot's function with, and what is compared afterwards. */
#ifndef PHASEWISE_USER_SLOTS_ROWS_H
#define PHASEWISE_USER_SLOTS_ROWS_H

#include <stdbool.h>

#include "user_slots/user_slots.h"
#include "user_slots/verdict.h"

/* PW_SLOT_MOST floats each: the checker's, and the candidate's to read and to write. They are the same memory. */
typedef struct {
    float *own;
    const float *read_only;
    float *writable;
} pw_slot_rows;

typedef struct {
    pw_slot_rows a, b, y;
} pw_slot_place;

/* a: x or the gate. b: w, up, or a bias; NULL: no bias. */
typedef struct {
    int64_t n;
    const float *a, *b;
    float eps;
    float *y;
} pw_slot_call;

typedef struct {
    int slot;
    pw_slot_function function, built_in;
    uint64_t seed, digest;
    pw_slot_place *place;
    pw_slot_verdict *verdict;
    float *pool;   /* numbers of every kind, drawn once */
    float *wanted; /* PW_SLOT_MOST: what the built-in function gives */
} pw_slot_check;

bool pw_slot_open(pw_slot_check *check);
void pw_slot_close(pw_slot_check *check);

void pw_call_slot(int slot, pw_slot_function function, const pw_slot_call *call);

/* The i-th number of a sequence that the seed begins. */
uint64_t pw_slot_random(uint64_t seed, uint64_t i);

/* Rows without zeros, subnormals and what is not finite; which numbers depends on `turn`. */
void pw_slot_plain_rows(const pw_slot_check *check, int turn, int64_t n, float *a, float *b);

/* The first index at which bits differ, one NaN being as good as another; -1: none. */
int64_t pw_slot_difference(int64_t n, const float *wanted, const float *given);

int pw_slot_trials(void);

/* One call in one way. False where it breaks the contract, and then the verdict says how. */
bool pw_try_slot(pw_slot_check *check, int trial, int64_t n);

#endif
