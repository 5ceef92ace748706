/* Where the members of a team count that they have arrived at a barrier: first beside those of their L3, the last of
 * these beside the other L3s of their node, the last of a node beside the other nodes. So a line crosses nodes once for
 * each node, however many cores it has. A level that would part nothing is left out: on one L3 there is one counter. */
#ifndef PW_ARRIVALS_H
#define PW_ARRIVALS_H

#include <stdatomic.h>
#include <stdbool.h>

#define PW_LINE 64

typedef struct pw_arrivals {
    _Alignas(PW_LINE) atomic_int count;
    int expected;
    int node; /* that all who count here have in common; -1: several */
    struct pw_arrivals *above;
} pw_arrivals;

/* Where a member runs. Numbers only tell alike from unlike. */
typedef struct {
    int l3, node;
} pw_place;

/* The place of a CPU, as the system tells it; zeros where it does not. */
pw_place pw_place_of(int cpu);

/* Fills first[n] with each member's own counter. The result is one allocation, to be freed; NULL: no memory. */
pw_arrivals *pw_arrivals_open(int n, const pw_place *places, pw_arrivals **first);

/* How many arrivals of a barrier may find the line in another node's caches. */
int pw_arrivals_crossings(int n, pw_arrivals *const *first);

/* True for the member that arrives last of all. Whoever it was, it sees what all wrote before they arrived. */
static inline bool pw_arrive(pw_arrivals *at) {
    for (; at; at = at->above) {
        if (atomic_fetch_add_explicit(&at->count, 1, memory_order_acq_rel) != at->expected - 1) return false;
        atomic_store_explicit(&at->count, 0, memory_order_relaxed);
    }
    return true;
}

#endif
