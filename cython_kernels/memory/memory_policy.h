/* On which NUMA node pages are to lie: the kernel's memory policies, by raw system call, so that libnuma is not needed.
 *
 * A policy asks, it does not insist: pages go to the node while it has room, then elsewhere. All functions return 0 or
 * an errno; EPERM or ENOSYS where a container's seccomp profile denies the call. */
#ifndef PHASEWISE_MEMORY_POLICY_H
#define PHASEWISE_MEMORY_POLICY_H

#include <stddef.h>
#include <stdint.h>

enum { PW_MOST_NODES = 1024 }; /* more than Linux can have */

/* Pages that the calling thread touches first, and those of threads that it starts from now on; on several nodes by turns. */
int pw_prefer_nodes(const int32_t *nodes, int n_nodes);

/* The calling thread's pages go where it runs again: the system's default. */
int pw_prefer_no_node(void);

/* Pages of a mapping that do not exist yet; of a shared one, whichever process touches them. Pages partly covered count
 * whole. By turns they are small ones where each node would get few huge ones. */
int pw_place_on_nodes(void *memory, size_t bytes, const int32_t *nodes, int n_nodes);

/* Adds to pages[node], of PW_MOST_NODES, those that this process has touched there. */
int pw_pages_by_node(const void *memory, size_t bytes, int64_t *pages);

/* Those that do not exist yet may be huge ones, where they lie within these bytes whole. */
void pw_huge_pages_within(void *memory, size_t bytes);

/* The page that holds this byte becomes this process's own, zeroed. Others that share the mapping keep theirs. 0 or an
 * errno, and then nothing has changed: a process may have only so many mappings. */
int pw_own_page(void *memory);

/* Pages of a mapped file go; they are read again where they are wanted. Whole pages, from the one that holds the first byte. */
void pw_drop_mapped(void *memory, size_t bytes);

#endif
