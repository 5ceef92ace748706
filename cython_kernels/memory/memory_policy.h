/* On which NUMA node pages are to lie: the kernel's memory policies, by raw system call, so that libnuma is not needed.
 *
 * A policy asks, it does not insist: pages go to the node while it has room, then elsewhere. All functions return 0 or
 * an errno; EPERM or ENOSYS where a container's seccomp profile denies the call. */
#ifndef PHASEWISE_MEMORY_POLICY_H
#define PHASEWISE_MEMORY_POLICY_H

#include <stddef.h>

/* Pages that the calling thread touches first, and those of threads that it starts from now on. */
int pw_prefer_node(int node);

/* The calling thread's pages go where it runs again: the system's default. */
int pw_prefer_no_node(void);

/* Pages of a mapping that do not exist yet; of a shared one, whichever process touches them. Pages partly covered count whole. */
int pw_place_on_node(void *memory, size_t bytes, int node);

#endif
