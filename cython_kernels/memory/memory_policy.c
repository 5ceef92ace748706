#define _GNU_SOURCE
#include "memory/memory_policy.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORD_BITS (8 * sizeof(unsigned long))
#define HUGE_PAGE ((size_t)2 << 20)
#define LEAST_HUGE_EACH 16 /* huge pages that a node must get, so that one more or less is few percent */
#define ASKED_AT_ONCE 512

typedef struct {
    unsigned long words[PW_MOST_NODES / WORD_BITS];
} node_mask;

/* The policy that pages on `nodes` ask for: the only one first, several by turns. -1: no nodes, or numbers that none has. */
static int policy_of(const int32_t *nodes, int n_nodes, node_mask *mask) {
    memset(mask, 0, sizeof *mask);
    for (int i = 0; i < n_nodes; ++i) {
        if (nodes[i] < 0 || nodes[i] >= PW_MOST_NODES - 1) return -1;
        mask->words[(size_t)nodes[i] / WORD_BITS] |= 1ul << ((size_t)nodes[i] % WORD_BITS);
    }
    return n_nodes < 1 ? -1 : n_nodes == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
}

int pw_prefer_nodes(const int32_t *nodes, int n_nodes) {
    node_mask mask;
    int policy = policy_of(nodes, n_nodes, &mask);
    if (policy < 0) return EINVAL;
    return syscall(SYS_set_mempolicy, policy, mask.words, (unsigned long)PW_MOST_NODES) ? errno : 0;
}

int pw_prefer_no_node(void) { return syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0ul) ? errno : 0; }

int pw_place_on_nodes(void *memory, size_t bytes, const int32_t *nodes, int n_nodes) {
    node_mask mask;
    int policy = policy_of(nodes, n_nodes, &mask);
    if (policy < 0) return EINVAL;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)memory / page * page, end = ((uintptr_t)memory + bytes + page - 1) / page * page;
    if (n_nodes > 1 && bytes < (size_t)n_nodes * LEAST_HUGE_EACH * HUGE_PAGE)
        madvise((void *)begin, end - begin, MADV_NOHUGEPAGE); /* a refusal is a kernel without huge pages */
    return syscall(SYS_mbind, begin, end - begin, policy, mask.words, (unsigned long)PW_MOST_NODES, 0u) ? errno : 0;
}

int pw_pages_by_node(const void *memory, size_t bytes, int64_t *pages) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)memory / page * page, end = (uintptr_t)memory + bytes;
    while (at < end) {
        void *asked[ASKED_AT_ONCE];
        int node[ASKED_AT_ONCE];
        unsigned long count = 0;
        for (; count < ASKED_AT_ONCE && at < end; at += page) asked[count++] = (void *)at;
        if (syscall(SYS_move_pages, 0, count, asked, NULL, node, 0)) return errno;
        for (unsigned long i = 0; i < count; ++i)
            if (node[i] >= 0 && node[i] < PW_MOST_NODES) ++pages[node[i]];
    }
    return 0;
}

void pw_huge_pages_within(void *memory, size_t bytes) {
    uintptr_t begin = ((uintptr_t)memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uintptr_t end = ((uintptr_t)memory + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* if refused, small ones serve too */
}

int pw_own_page(void *memory) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *begin = (void *)((uintptr_t)memory / page * page);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap(begin, page, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED ? errno : 0;
}

void pw_drop_mapped(void *memory, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)memory / page * page;
    madvise((void *)begin, (uintptr_t)memory + bytes - begin, MADV_DONTNEED);
}
