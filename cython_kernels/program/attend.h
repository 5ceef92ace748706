/* Attention of a program: planning a step's pieces, and a member's share of them. */
#ifndef PHASEWISE_ATTEND_H
#define PHASEWISE_ATTEND_H

#include "program/attend_scratch.h"
#include "program/run.h"

/* What attention runs by where nothing is tuned: `tokens` of a step, or the `chunks` that single tokens see. Of a
 * rank: shape->n_kv_heads are its own. */
pw_schedule pw_default_attention(const pw_shape *shape, int64_t tokens, int64_t chunks, int threads);

/* Cuts a step's attention into pieces. Of a schedule count: mr, query rows of a tile; block_m, query rows of a piece
 * that has more than one token; block_k, positions of a piece of a slice with one token (whole chunks). */
void pw_plan_attention(pw_program *program, int threads, int32_t table);

void pw_run_attend(pw_run *run, const pw_op *op, int member);

#endif
