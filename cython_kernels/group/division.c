#include "group/division.h"

pw_division pw_division_of(int32_t ranks, const int32_t *threads, int32_t rank) {
    pw_division division = {.ranks = ranks};
    for (int32_t i = 0; i < ranks; ++i) {
        if (i < rank) division.first_thread += threads[i];
        if (i == rank) division.own_threads = threads[i];
        division.n_threads += threads[i];
    }
    return division;
}

pw_range pw_share_of(const pw_division *division, int64_t count) {
    if (division->own_threads == 0) return (pw_range){0, 0};
    int64_t first = division->first_thread, threads = division->n_threads;
    return (pw_range){count * first / threads, count * (first + division->own_threads) / threads};
}
