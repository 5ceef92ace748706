/* Which positions rows of latent attention see, where an indexer chooses (DeepSeek-V3.2, 2025, eq. 1 and 2). */
#ifndef PHASEWISE_CHOOSE_H
#define PHASEWISE_CHOOSE_H

#include "program/run.h"

/* Floats of scratch that the program's PW_INDEX ops need; 0 without any. */
int64_t pw_choice_floats(const pw_program *program);

void pw_run_choose(pw_run *run, const pw_op *op, int member);

#endif
