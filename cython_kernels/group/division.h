/* How the processes of a step share it out: panels of weights and KV heads in proportion to what they weigh, rows in
 * proportion to their threads. */
#ifndef PHASEWISE_DIVISION_H
#define PHASEWISE_DIVISION_H

#include <stdint.h>

#include "gemm.h"

/* The ranks that run by one table of schedules. */
typedef struct {
    int32_t ranks;                                /* 1: this process alone; 0: none, the table is not run */
    int32_t first_thread, own_threads, n_threads; /* this rank's threads among those of all ranks; own 0: takes no part */
    int32_t rank;
    int64_t first_weight, own_weight, n_weight;   /* what it weighs, likewise; where cores are alike, as its threads */
} pw_division;

/* What a rank has of attention. Up to as many ranks as KV heads have some of these, with all of their query heads. More
 * ranks have one each, which those beside them have as well, and some of its query heads: no query head is divided. Each
 * of them keeps a copy of the KV head. */
typedef struct {
    pw_range kv_heads;
    int32_t first, count;  /* query heads of each: `count` from number `first` of its group on */
    int32_t copy, sharers; /* which copy this rank reads, among those that so many ranks keep */
} pw_head_share;

/* Ranks of `threads` threads each, which weigh `weights`, as `rank` sees them. */
pw_division pw_division_of(int32_t ranks, const int32_t *threads, const int32_t *weights, int32_t rank);

/* This rank's share of `count` panels or heads. */
pw_range pw_share_of(const pw_division *division, int64_t count);

/* Its share of KV heads, each with a group of so many query heads. */
pw_head_share pw_heads_of(const pw_division *division, int32_t n_kv_heads, int32_t group);

/* The ranks that have a KV head, and so copies of it that they need. */
int32_t pw_sharers_of(const pw_division *division, int32_t n_kv_heads, int32_t group, int32_t kv_head);

#endif
