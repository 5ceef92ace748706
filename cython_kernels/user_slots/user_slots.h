/* The functions of users in the table in use (contract.h): filled, called and emptied. */
#ifndef PHASEWISE_USER_SLOTS_H
#define PHASEWISE_USER_SLOTS_H

#include "dispatch.h"
#include "user_slots/contract.h"

enum {
    PW_SLOT_RMS_NORM,
    PW_SLOT_GATES, /* one for each of PW_EACH_GATE */
    PW_SLOT_ACTIVATIONS = PW_SLOT_GATES + PW_GATES,
    PW_SLOT_EXPONENTIAL = PW_SLOT_ACTIVATIONS + PW_ACTIVATIONS,
    PW_SLOTS,
};

/* Lengths that are checked: every one up to the first number, then multiples of the second up to the third. */
enum { PW_SLOT_EVERY = 4096, PW_SLOT_STEP = 64, PW_SLOT_MOST = 32768 };

static inline int pw_slot_length_is_checked(int64_t n) {
    if (n >= 1 && n <= PW_SLOT_EVERY) return 1;
    return n > PW_SLOT_EVERY && n <= PW_SLOT_MOST && n % PW_SLOT_STEP == 0;
}

/* Of any slot: cast to the type of contract.h before a call. */
typedef void (*pw_slot_function)(void);

/* Of a row operation of `ops`, the function in a slot. */
pw_slot_function pw_slot_of(const pw_op_kernels *ops, int slot);

/* Calls `function` in place of the built-in one from now on, for lengths that were checked. Between steps only; pw_select
 * empties all slots. */
void pw_fill_slot(int slot, pw_slot_function function);
void pw_empty_slots(void);
int pw_slot_is_filled(int slot);

#endif
