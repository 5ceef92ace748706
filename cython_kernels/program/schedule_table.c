#include "program/schedule_table.h"

#include <stdlib.h>
#include <string.h>

bool pw_schedules_replace(pw_schedules *schedules, int32_t count, const pw_row_range *ranges) {
    pw_row_range *copy = malloc(sizeof *copy * (size_t)(count > 1 ? count : 1));
    if (!copy) return false;
    if (count) memcpy(copy, ranges, sizeof *copy * (size_t)count);
    free(schedules->ranges);
    *schedules = (pw_schedules){count, copy};
    return true;
}

const pw_schedule *pw_tuned(const pw_schedules *known, int64_t rows) {
    int32_t low = 0, high = known->count; /* the first range that reaches so far */
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (known->ranges[middle].last_rows < rows)
            low = middle + 1;
        else
            high = middle;
    }
    return low < known->count && known->ranges[low].tuned ? &known->ranges[low].schedule : NULL;
}

pw_schedule pw_schedule_for(const pw_schedules *known, const pw_weight *weight, int64_t rows, int threads) {
    const pw_schedule *tuned = pw_tuned(known, rows);
    return tuned ? *tuned : pw_default_schedule(weight, rows, threads);
}
