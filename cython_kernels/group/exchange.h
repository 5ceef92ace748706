/* Collectives over messages that do not lie in shared memory: each passes through it in pieces.
 *
 * The ranks of a group own PW_EXCHANGE_SLOTS slots each. Piece number k of every message lies in slot k % 3 of its rank;
 * the number goes on from call to call, and is the same on all ranks. Every piece has a barrier after it was written, and
 * what reads it is done before its rank arrives at the barrier after the next piece: a slot is free when its turn comes
 * again, so no rank waits only to write.
 *
 * All ranks make the same calls in the same order. The first piece of a call says what the call is: where ranks differ,
 * all of them get PW_EXCHANGE_UNLIKE, and nothing was written. */
#ifndef PHASEWISE_GROUP_EXCHANGE_H
#define PHASEWISE_GROUP_EXCHANGE_H

#include "group/group.h"

#include <stdint.h>

enum {
    PW_EXCHANGE_SLOTS = 3,
    PW_EXCHANGE_LINE = 64, /* slot_bytes is a multiple of it; the first line of a slot says what call it is of */
    PW_EXCHANGE_UNLIKE = -3,
};

/* What is added up. bf16 is added in float32 and rounded once, to the nearest, ties to even. */
typedef enum { PW_ADDS_F32, PW_ADDS_F64, PW_ADDS_BF16, PW_ADDS_I32, PW_ADDS_I64, PW_ADDS_COUNT } pw_addend;

/* One rank's view; `piece` begins at 0 on every rank. */
typedef struct {
    pw_group *group;
    uint8_t *slots; /* [ranks][PW_EXCHANGE_SLOTS][slot_bytes], aligned to a line */
    int64_t slot_bytes;
    int rank, n_ranks;
    uint64_t piece;
} pw_exchange;

int64_t pw_exchange_slots_bytes(int n_ranks, int64_t slot_bytes);

/* data[i] = that of rank 0 + ... + that of the last, in this order, on every rank the same bits. */
int pw_exchange_all_reduce(pw_exchange *exchange, pw_addend type, int64_t count, void *data, long timeout_ns);

/* outs[q] = what rank q passes as `own`; all of `bytes` bytes. `own` may be one of them. */
int pw_exchange_all_gather(pw_exchange *exchange, int64_t bytes, const void *own, void *const *outs, long timeout_ns);

/* data = that of rank `root`. */
int pw_exchange_broadcast(pw_exchange *exchange, int root, int64_t bytes, void *data, long timeout_ns);

int pw_exchange_barrier(pw_exchange *exchange, long timeout_ns);

#endif
