/* How the processes of a step share it out: panels of weights, KV heads and rows, in proportion to their threads. */
#ifndef PHASEWISE_DIVISION_H
#define PHASEWISE_DIVISION_H

#include <stdint.h>

#include "gemm.h"

/* The ranks that run by one table of schedules. */
typedef struct {
    int32_t ranks;                                /* 1: this process alone; 0: none, the table is not run */
    int32_t first_thread, own_threads, n_threads; /* this rank's threads among those of all ranks; own 0: takes no part */
} pw_division;

/* Ranks of `threads` threads each, as `rank` sees them. */
pw_division pw_division_of(int32_t ranks, const int32_t *threads, int32_t rank);

/* This rank's share of `count` panels or heads. */
pw_range pw_share_of(const pw_division *division, int64_t count);

#endif
