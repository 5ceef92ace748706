#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "memory/memory_policy.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_NODES 4096
#define WORD_BITS (8 * sizeof(unsigned long))

typedef struct {
    unsigned long words[MAX_NODES / WORD_BITS];
} node_mask;

static int mask_of(int node, node_mask *mask) {
    if (node < 0 || node >= MAX_NODES - 1) return EINVAL;
    memset(mask, 0, sizeof *mask);
    mask->words[(size_t)node / WORD_BITS] = 1ul << ((size_t)node % WORD_BITS);
    return 0;
}

int pw_prefer_node(int node) {
    node_mask mask;
    if (mask_of(node, &mask)) return EINVAL;
    return syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.words, (unsigned long)MAX_NODES) ? errno : 0;
}

int pw_prefer_no_node(void) { return syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0ul) ? errno : 0; }

int pw_place_on_node(void *memory, size_t bytes, int node) {
    node_mask mask;
    if (mask_of(node, &mask)) return EINVAL;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)memory / page * page, end = ((uintptr_t)memory + bytes + page - 1) / page * page;
    return syscall(SYS_mbind, begin, end - begin, MPOL_PREFERRED, mask.words, (unsigned long)MAX_NODES, 0u) ? errno : 0;
}
