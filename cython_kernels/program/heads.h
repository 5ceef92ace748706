/* Products by head: numbers of a head times a weight of its own. */
#ifndef PHASEWISE_HEADS_H
#define PHASEWISE_HEADS_H

#include "program/run.h"

/* Every head of every row of a step (pw_heads); one rank. A row's result depends on that row alone. */
void pw_run_heads(pw_run *run, const pw_op *op, int member);

#endif
