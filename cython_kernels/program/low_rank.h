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

enum { PW_MAX_TARGETS = 3, PW_MAX_ADAPTERS = 256, PW_MAX_LOW_ROWS = 4096 };

/* Some columns of an op's output rows: y[column ..] += up (low[from ..] as its inputs). `column` is whole panels away from
 * the first column of the part that it lies in. */
typedef struct {
    int64_t column, from;
    pw_thin_weight up;
} pw_low_rank_target;

typedef struct pw_low_rank {
    int32_t n_targets;   /* 0: this adapter leaves the op alone */
    pw_thin_weight down; /* [sum of ranks][k] */
    const float *scales; /* [sum of ranks]: of what it gives */
    pw_low_rank_target targets[PW_MAX_TARGETS];
} pw_low_rank;

/* Before the program is sealed: adapter `adapter` (from 1 on) of a linear op. A copy is kept. False without memory. */
bool pw_program_adapt(pw_program *program, int32_t op, int32_t adapter, const pw_low_rank *low_rank);

/* Bytes of rows on their way, which ranks share, and their places from `memory` on. */
int64_t pw_low_rank_bytes(const pw_program *program);
bool pw_low_rank_open(pw_program *program, char *memory);
void pw_low_rank_close(pw_program *program);

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
