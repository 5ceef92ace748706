/* One product, timed on a team as a program runs it: rows prepared, multiplied, a barrier.
 *
 * x is made of random floats; weights are taken in turn from a list of equal ones: one measures them warm, more than
 * the last cache holds measures them cold. */
#ifndef PHASEWISE_TEAM_PRODUCT_H
#define PHASEWISE_TEAM_PRODUCT_H

#include <stdbool.h>

#include "team/product.h"

typedef struct {
    const pw_kernels *kernels; /* in use when it was opened */
    pw_team *team;
    int threads;
    int32_t n_weights;
    pw_weight *weights;
    int64_t taken; /* of the weights: a call goes on where the last one stopped */
    int64_t rows, ldy;
    pw_form form;
    int64_t row_bytes;
    char *memory; /* pages: x, prepared rows, y, part sums */
    int64_t memory_bytes;
    float *x, *y, *split;
    char *prepared;
    int64_t split_floats;
    pw_ticket *tickets; /* [2][threads]: those of the next call are cleared while this one runs */
} pw_team_product;

/* Copies the weights' fields, which are all of one shape and arithmetic. NULL without memory. */
pw_team_product *pw_team_product_open(pw_team *team, int32_t n_weights, const pw_weight *weights, int64_t rows);
void pw_team_product_close(pw_team_product *product);

/* Fills x with numbers from -1 to 1 and prepares it. PW_TEAM_OK or the team's failure. */
int pw_team_product_fill(pw_team_product *product, uint64_t seed);

/* Runs `calls` products one after another and gives the nanoseconds of each; `prepare`: x is prepared in each. */
int pw_team_product_time(pw_team_product *product, const pw_schedule *schedule, int calls, bool prepare, int64_t *ns);

#endif
