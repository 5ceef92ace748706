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
