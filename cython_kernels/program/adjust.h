/* Rows of a program that are changed one by one, without a product: normalised, biased, capped, added: a member's share. */
#ifndef PHASEWISE_ADJUST_H
#define PHASEWISE_ADJUST_H

#include "program/run.h"

void pw_run_adjust(pw_run *run, const pw_op *op, int member);

#endif
