/* Several streams beside each other, of which layers change one and predict the others (AltUp, Baykal et al. 2023). */
#ifndef PHASEWISE_STREAMS_H
#define PHASEWISE_STREAMS_H

#include "program/run.h"

/* A row's sum of products with each stream's router gives numbers m = tanh(R norm(x)); then, by the op's mode,
 *
 * PW_PREDICT: of each stream s_j + sum_k (P m)[j count + k] s_k, in its place; the active one is copied to `out`.
 * PW_CORRECT: `in` is the active stream x behind a layer, and what m is of: s_j + (1 + (C m)[j]) (x - s_active), to `to`;
 *             `out` gets the active one of them times `scale`.
 * PW_SPREAD:  `in` is stream 0; the others, which lie where they belong, get its length.
 * PW_MERGE:   the mean of stream 0 and of those at `to`, which get its length, to `out`.
 *
 * Streams lie by rows of the step, what rows that want logits get at `to` by their own. */
void pw_run_streams(pw_run *run, const pw_op *op, int member);

#endif
