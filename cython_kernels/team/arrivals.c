#include "team/arrivals.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { L3S, NODES, MACHINE, LEVELS };

pw_place pw_place_of(int cpu) {
    pw_place place = {0, 0};
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cache/index3/shared_cpu_list", cpu);
    FILE *list = fopen(path, "re");
    if (list) {
        if (fscanf(list, "%d", &place.l3) != 1) place.l3 = 0; /* the first CPU of its L3 */
        fclose(list);
    }
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d", cpu);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (sscanf(entry->d_name, "node%d", &place.node) == 1) break;
    if (folder) closedir(folder);
    return place;
}

/* The first member of the same group at a level: L3s of different nodes are different ones. */
static int leader(int n, const pw_place *places, int level, int member) {
    if (level == MACHINE) return 0;
    for (int i = 0; i < n; ++i)
        if (places[i].node == places[member].node && (level == NODES || places[i].l3 == places[member].l3)) return i;
    return member;
}

static int n_groups(int n, const pw_place *places, int level) {
    int count = 0;
    for (int i = 0; i < n; ++i) count += leader(n, places, level, i) == i;
    return count;
}

/* Levels that part the members further than the one above, and bring some together; the uppermost is the last. */
static int levels_of(int n, const pw_place *places, int *levels) {
    int count = 0, below = n;
    for (int level = L3S; level < LEVELS; ++level) {
        int groups = n_groups(n, places, level);
        if (groups == below && !(level == MACHINE && count == 0)) continue;
        levels[count++] = level;
        below = groups;
    }
    return count;
}

pw_arrivals *pw_arrivals_open(int n, const pw_place *places, pw_arrivals **first) {
    int levels[LEVELS], n_levels = levels_of(n, places, levels);
    size_t bytes = sizeof(pw_arrivals) * (size_t)(n_levels * n); /* the counter of a group is its leader's */
    pw_arrivals *all = aligned_alloc(PW_LINE, bytes);
    if (!all) return NULL;
    memset(all, 0, bytes);
    for (int i = 0; i < n; ++i) first[i] = &all[leader(n, places, levels[0], i)];
    for (int at = 0; at < n_levels; ++at)
        for (int i = 0; i < n; ++i) {
            bool counts = at == 0 || leader(n, places, levels[at - 1], i) == i;
            if (!counts) continue;
            int own = leader(n, places, levels[at], i);
            pw_arrivals *counter = &all[at * n + own];
            counter->node = counter->expected == 0 || counter->node == places[i].node ? places[i].node : -1;
            counter->expected += 1;
            if (at + 1 < n_levels) counter->above = &all[(at + 1) * n + leader(n, places, levels[at + 1], own)];
        }
    return all;
}

/* A counter is met first on the way of some member. */
static bool is_new(pw_arrivals *const *first, int member, const pw_arrivals *counter) {
    for (int i = 0; i < member; ++i)
        for (const pw_arrivals *at = first[i]; at; at = at->above)
            if (at == counter) return false;
    return true;
}

int pw_arrivals_crossings(int n, pw_arrivals *const *first) {
    int crossings = 0;
    for (int i = 0; i < n; ++i)
        for (const pw_arrivals *at = first[i]; at; at = at->above)
            if (at->node < 0 && is_new(first, i, at)) crossings += at->expected - 1;
    return crossings;
}
