/* Where rank 0 and the others leave each other word: the layout of orders in the memory that ranks share.
 *
 * Every rank has a letter box. An order is taken out of its box once. What is in the region besides describes the step
 * that the last order is for, and tells where each rank's threads were seen. */
#ifndef PHASEWISE_ORDERS_REGION_H
#define PHASEWISE_ORDERS_REGION_H

#include <stdatomic.h>
#include <stdint.h>

enum { PW_OBSERVED_THREADS = 1024, PW_ORDERS_ISA_NAME = 32 }; /* threads of a rank, whose CPUs are told */

typedef struct {
    _Alignas(128) atomic_uint order;
} pw_letter_box;

/* Where a rank's threads were seen, written by itself after a step. */
typedef struct {
    _Atomic int64_t misplaced;
    _Atomic int32_t cpus[PW_OBSERVED_THREADS];
} pw_observation;

typedef struct {
    int64_t shared_bytes; /* as rank 0 has laid them out */
    int32_t n_ops;
    int32_t table; /* of the last step; -1 before */
    int64_t n_tokens, n_slices, n_logit_rows;
    char isa[PW_ORDERS_ISA_NAME];
    pw_letter_box boxes[]; /* [n_ranks], then pw_observation [PW_SCHEDULE_TABLES][n_ranks] */
} pw_orders;

/* Where the region begins in the shared memory: after the group. Its bytes. */
int64_t pw_orders_offset(int32_t n_ranks);
int64_t pw_orders_bytes(int32_t n_ranks);

pw_observation *pw_observation_of(pw_orders *orders, int32_t n_ranks, int32_t table, int32_t rank);

#endif
