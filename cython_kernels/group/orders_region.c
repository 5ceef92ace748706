#include "group/orders_region.h"

#include "group/group.h"
#include "program/schedule_table.h"

static int64_t boxes_end(int32_t n_ranks) {
    return (int64_t)sizeof(pw_orders) + n_ranks * (int64_t)sizeof(pw_letter_box);
}

int64_t pw_orders_offset(int32_t n_ranks) { return pw_group_bytes(n_ranks); }

int64_t pw_orders_bytes(int32_t n_ranks) {
    return boxes_end(n_ranks) + PW_SCHEDULE_TABLES * n_ranks * (int64_t)sizeof(pw_observation);
}

pw_observation *pw_observation_of(pw_orders *orders, int32_t n_ranks, int32_t table, int32_t rank) {
    pw_observation *first = (pw_observation *)(void *)((char *)orders + boxes_end(n_ranks));
    return first + table * n_ranks + rank;
}

void pw_orders_init(pw_orders *orders, int32_t n_ranks, int64_t shared_bytes, int32_t n_ops) {
    orders->shared_bytes = shared_bytes;
    orders->n_ops = n_ops;
    orders->table = -1;
    for (int32_t i = 0; i < PW_SCHEDULE_TABLES * n_ranks; ++i)
        for (int32_t thread = 0; thread < PW_OBSERVED_THREADS; ++thread)
            atomic_store(&pw_observation_of(orders, n_ranks, 0, i)->cpus[thread], -1);
}

bool pw_orders_match(const char *shared, int32_t n_ranks, int64_t shared_bytes, int32_t n_ops) {
    const pw_orders *orders = (const pw_orders *)(const void *)(shared + pw_orders_offset(n_ranks));
    return pw_group_ranks((const pw_group *)(const void *)shared) == n_ranks &&
           orders->shared_bytes == shared_bytes && orders->n_ops == n_ops;
}
