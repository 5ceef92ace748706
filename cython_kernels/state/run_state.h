/* Layers of a program that keep a state of each sequence beside, or in place of, keys and values: a member's share of each op.
 *
 * A state is a row of floats of constant length in a place of its own: each op has a part of it. A slice whose start is 0 begins
 * with zeros; another one with what its place holds, and leaves there the state after its last row. Copies of the state after
 * some of its rows go to other places (pw_keep), so that a sequence can go on from there later.
 *
 * Rows of a sequence are computed one after the other, so that no cut of a prompt changes a bit; members share channels and heads. */
#ifndef PHASEWISE_RUN_STATE_H
#define PHASEWISE_RUN_STATE_H

#include "program/run.h"

/* NULL, or what is wrong: no place is given twice in a step. */
const char *pw_check_states(pw_program *program);

/* Rows times [taps] of each channel (families/rows/recurrence.c). gates_rows: of a row [gate, factor, x] of 3 k the convolution is
 * of factor x, and times the gate. Its part of a state: the rows [taps - 1][k] before. */
void pw_run_convolve(pw_run *run, const pw_op *op, int member);

/* Of each head a decay e^(rate t) and the factor of its change, to `out` as [heads], [heads]; t = softplus(in + offset), within
 * limits. erases: `in` has factors before their logistic and then what t is of; else the factor is t. by_key: `in` has what the times
 * of all numbers of keys are of, and factors from factor_at on; decays are [heads][key_dim], and the heads' ones after them. Queries and keys in `second` are
 * normalised by their 2-norm, times query_scale and key_scale. */
void pw_run_state_gates(pw_run *run, const pw_op *op, int member);

/* The recurrence of each head. `in`: queries, keys, values; `second`: gates. Its part of a state: of each head and sixteen
 * columns [key_dim][16]. */
void pw_run_recur(pw_run *run, const pw_op *op, int member);

/* Rows of `in` times act(`second`), `gate` being its number; with weights normalised by heads before, or by groups after;
 * without, times `scale`.
 * one_gate: times the logistic of the one number of a row of `second`. */
void pw_run_gate_rows(pw_run *run, const pw_op *op, int member);

/* Floats of the parts of a state. */
static inline int64_t pw_convolution_floats(const pw_op *op) { return (op->state.taps - 1) * op->k; }
static inline int64_t pw_state_blocks(const pw_op *op) { return (op->state.value_dim + 15) / 16; }
static inline int64_t pw_recurrence_floats(const pw_op *op) {
    return op->state.heads * pw_state_blocks(op) * op->state.key_dim * 16;
}

#endif
