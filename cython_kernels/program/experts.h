/* A mixture of experts in a program: which experts compute which rows, their products, and the sum of what they give.
 *
 * Rows are gathered by expert. The products of all experts of a step are one list of (expert, run of panels), busiest
 * expert first, from which members take; experts without rows are in no list, so that their weights are not read. A
 * row's result depends on its own experts alone: each is computed in the order of its weight's arithmetic, and the
 * row's results are added in the order of its logits. */
#ifndef PHASEWISE_EXPERTS_H
#define PHASEWISE_EXPERTS_H

#include "program/run.h"

/* Router logits [rows][count] to the program's routes. */
void pw_run_route(pw_run *run, const pw_op *op, int member);

/* PW_FROM_NORM or PW_FROM_ROWS: rows times the weights of their experts, to pairs. PW_FROM_GATE or
 * PW_FROM_ACTIVATION: pairs to pairs. */
void pw_run_experts(pw_run *run, const pw_op *op, int member);

/* Adds to each row what its experts gave, times their weights. */
void pw_run_combine(pw_run *run, const pw_op *op, int member);

#endif
