/* One run of a program's step: what its members share, and how they wait for one another. */
#ifndef PHASEWISE_RUN_H
#define PHASEWISE_RUN_H

#include "program/program.h"

/* What a run ends with, beside a team's PW_TEAM_OK and failures. */
enum { PW_RUN_GROUP_FAILED = -20, PW_RUN_LATE = -21, PW_RUN_MISFIT = -22 };

typedef struct {
    pw_program *program;
    pw_team *team;
    const pw_kernels *kernels;
    int threads;
    int32_t table; /* of schedules */
    const pw_division *division;
    atomic_int status; /* of the last barrier over ranks: PW_TEAM_OK, or what the run ends with */
} pw_run;

/* A barrier over the threads of all ranks. False: the run has failed, and every member gives it up here. */
bool pw_meet(pw_run *run, int member);

/* A row as a linear op reads it: where it lies, or normalised or gated in `scratch`. */
const float *pw_op_input(const pw_run *run, const pw_op *op, int64_t row, float *scratch);

/* Turns the pairs of x as the op's kind of attention says of a row, times `factor`. */
void pw_turn_row(const pw_run *run, const pw_op *op, int64_t row, float factor, const float *x, float *out);

/* Rows of the step that an op computes. */
static inline int64_t pw_op_rows(const pw_run *run, const pw_op *op) {
    return op->rows == PW_EVERY_ROW ? run->program->step.n_tokens : run->program->step.n_logit_rows;
}

/* A member's share of rows among the threads of all ranks. */
pw_range pw_rows_of(const pw_run *run, int64_t rows, int member);

#endif
