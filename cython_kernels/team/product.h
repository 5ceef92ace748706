/* One product y = x W^T on a thread team: who computes which part of y.
 *
 * A schedule's grid cuts the product into regions, one for each thread (as large as the team weighs its member, where
 * it does), and a region into pieces along its outermost loop. A thread takes the pieces of its own region first, then those that other regions have left: one that the
 * system holds up does not hold up all. Where the grid cuts k, part sums wait in scratch until every thread has
 * arrived, and are then added in the order in which gemm would have added them. No result depends on any of this. */
#ifndef PHASEWISE_PRODUCT_H
#define PHASEWISE_PRODUCT_H

#include <stdatomic.h>

#include "dispatch.h"
#include "team/team.h"

typedef struct {
    const pw_weight *weight;
    pw_activations x; /* prepared */
    int64_t rows;     /* of x and y */
    float *y;
    int64_t ldy;
    pw_epilogue epilogue;
    /* PW_ADD to rows that lie elsewhere: row i of y begins as row base_rows[i] of `base`. NULL: y is already there. */
    const float *base;
    int64_t base_stride;
    const int64_t *base_rows;
    /* Called by whoever has finished some rows and columns of y, once for each; NULL: nobody waits for that. */
    void (*finish)(const void *what, pw_range rows, pw_range columns);
    const void *what;
} pw_product;

/* The next piece of a region that no thread has taken. */
typedef struct {
    _Alignas(64) atomic_long next;
} pw_ticket;

/* The members of a team, and what they share while they compute one product. */
typedef struct {
    pw_team *team; /* NULL: threads of another library, without a barrier, which never split k */
    int threads;
    const pw_gemm_kernels *kernels;
    pw_ticket *tickets; /* [most_regions], all zero when the product begins */
    int most_regions;   /* at least 1; grids with more regions become one row of panels */
    float *split;       /* scratch for part sums; NULL: k is never split over threads */
    int64_t split_floats;
} pw_crew;

/* A member's share; every member calls it, with the same arguments. y is complete once all have returned. */
void pw_multiply(const pw_product *product, const pw_schedule *schedule, const pw_crew *crew, int member);

/* A member's share of setting `count` tickets back to zero. */
void pw_clear_tickets(pw_ticket *tickets, int count, int threads, int member);

/* Part i of [0, count) by weights, cut at multiples of `unit`: ends[i] is what the parts before i weigh, ends[parts] what
 * all do. A part is within one unit of its due; equal weights give what pw_share gives. */
pw_range pw_weighed_part(int64_t count, int64_t unit, const int64_t *ends, int64_t parts, int64_t i);

/* Floats of scratch that k_parts part sums of `rows` rows need. */
int64_t pw_split_floats(const pw_weight *weight, int64_t rows);

#endif
