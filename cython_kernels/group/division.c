#include "group/division.h"

pw_division pw_division_of(int32_t ranks, const int32_t *threads, const int32_t *weights, int32_t rank) {
    pw_division division = {.ranks = ranks, .rank = rank};
    for (int32_t i = 0; i < ranks; ++i) {
        if (i < rank) division.first_thread += threads[i], division.first_weight += weights[i];
        if (i == rank) division.own_threads = threads[i], division.own_weight = weights[i];
        division.n_threads += threads[i], division.n_weight += weights[i];
    }
    return division;
}

pw_range pw_share_of(const pw_division *division, int64_t count) {
    if (division->own_threads == 0) return (pw_range){0, 0};
    int64_t first = division->first_weight, all = division->n_weight;
    return (pw_range){count * first / all, count * (first + division->own_weight) / all};
}

/* The ranks that share the KV heads before this one, where there are more of them than of KV heads. */
static int32_t sharers_before(int32_t ranks, int32_t n_kv_heads, int32_t kv_head) {
    return (int32_t)(((int64_t)kv_head * ranks + n_kv_heads - 1) / n_kv_heads);
}

/* A rank has a query head at least: of more ranks than query heads the last ones have nothing. */
static int32_t attending_ranks(const pw_division *division, int32_t n_heads) {
    return division->ranks < n_heads ? division->ranks : n_heads;
}

int32_t pw_sharers_of(const pw_division *division, int32_t n_kv_heads, int32_t group, int32_t kv_head) {
    int32_t ranks = attending_ranks(division, n_kv_heads * group);
    if (ranks <= n_kv_heads) return 1;
    return sharers_before(ranks, n_kv_heads, kv_head + 1) - sharers_before(ranks, n_kv_heads, kv_head);
}

pw_head_share pw_heads_of(const pw_division *division, int32_t n_kv_heads, int32_t group) {
    int32_t ranks = attending_ranks(division, n_kv_heads * group), rank = division->rank;
    if (division->ranks <= n_kv_heads) return (pw_head_share){pw_share_of(division, n_kv_heads), 0, group, 0, 1};
    if (division->own_threads == 0 || rank >= ranks) return (pw_head_share){{0, 0}, 0, group, 0, 1};
    int32_t head = (int32_t)((int64_t)rank * n_kv_heads / ranks);
    int32_t copy = rank - sharers_before(ranks, n_kv_heads, head);
    int32_t sharers = pw_sharers_of(division, n_kv_heads, group, head);
    int32_t first = group * copy / sharers, end = group * (copy + 1) / sharers;
    return (pw_head_share){{head, head + 1}, first, end - first, copy, sharers};
}
