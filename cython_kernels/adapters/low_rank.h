/* Low-rank products beside the weights of a linear op (LoRA): rows whose slice names an adapter get B (A x) on top.
 *
 * An op of a program with adapters has at most one `pw_low_rank` for each: A of all its targets one below the other, then
 * for each target B. Rows are grouped by adapter. Whoever prepares a row for the op's own weights computes A of it; who
 * finishes a piece of the op's product adds B to it: a step meets no more often than without adapters.
 *
 * x is not rounded, and every sum is one chain of float32 multiply-adds (families/rows/low_rank.c):
 *     |low - exact| <= gamma_k sum |a_i x_i|,   |delta - exact| <= gamma_(rank + 2) sum |b_j scale_j low_j|,
 * and the finished delta is added once. A row is computed for itself: no other row, adapter, cut or thread changes it, and
 * rows without an adapter are not touched. */
#ifndef PHASEWISE_LOW_RANK_H
#define PHASEWISE_LOW_RANK_H

#include "program/run.h"

/* Which rows of the step have which adapter; NULL, or what is wrong with the step. */
const char *pw_low_rank_check(pw_program *program);

/* The rows of an op that have an adapter which is not nothing to it; NULL where there are none. */
const pw_adapted *pw_adapted_rows(const pw_program *program, const pw_op *op);

/* Member's share of the first products, beside the rows [own) that it prepares. After a barrier over all ranks they are there. */
void pw_run_low_rank_down(const pw_run *run, const pw_op *op, const pw_adapted *adapted, pw_range own, int member);

/* A pw_product's `finish`: adds the second products to some rows and columns of a part that begins at `column`. */
typedef struct {
    const pw_run *run;
    const pw_op *op;
    const pw_adapted *adapted;
    int64_t column;
} pw_low_rank_addition;
void pw_add_low_rank(const void *addition, pw_range rows, pw_range columns);

#endif
