/* Tuned schedules by the number of rows: what a table holds and how it is looked up. No schedule changes a result. */
#ifndef PHASEWISE_SCHEDULE_TABLE_H
#define PHASEWISE_SCHEDULE_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "gemm.h"

enum {
    PW_SCHEDULE_TABLES = 5, /* teams of different shape want different schedules: prefill's, and decode's by load */
    PW_MAX_ROW_RANGES = 64,
};

/* What products of at most `last_rows` rows, and more than the range before it has, run by. */
typedef struct {
    int64_t last_rows;
    bool tuned; /* else: pw_default_schedule */
    pw_schedule schedule;
} pw_row_range;

/* Ascending ranges; beyond the last one, and with none at all: the default. */
typedef struct {
    int32_t count;
    pw_row_range *ranges;
} pw_schedules;

/* `count` ranges, copied, in place of those before. False without memory: nothing has changed then. */
bool pw_schedules_replace(pw_schedules *schedules, int32_t count, const pw_row_range *ranges);

/* The schedule for this number of rows; NULL: the default one. */
const pw_schedule *pw_tuned(const pw_schedules *schedules, int64_t rows);

/* What `rows` rows of a weight run by: the tuned schedule, else the default one. */
pw_schedule pw_schedule_for(const pw_schedules *schedules, const pw_weight *weight, int64_t rows, int threads);

#endif
