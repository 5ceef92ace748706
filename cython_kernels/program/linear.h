/* Embedding lookups, linear layers and changes of single rows of a program: a member's share. */
#ifndef PHASEWISE_LINEAR_H
#define PHASEWISE_LINEAR_H

#include "program/run.h"

void pw_run_embed(pw_run *run, const pw_op *op, int member);

/* Rows of groups of numbers: each group normalised, and the token's numbers in a packed matrix added, which are one or
 * several of its rows. */
void pw_run_layer_inputs(pw_run *run, const pw_op *op, int member);
void pw_run_linear(pw_run *run, const pw_op *op, int member);

/* Rows normalised, biased, capped, added. */
void pw_run_adjust(pw_run *run, const pw_op *op, int member);

/* Products by head (pw_heads, heads.c): every head of every row of a step, on one rank. A row's result depends on that row
 * alone. */
void pw_run_heads(pw_run *run, const pw_op *op, int member);

#endif
