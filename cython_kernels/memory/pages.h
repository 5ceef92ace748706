/* Large zeroed memory straight from the kernel, in huge pages where it has them: a core that asks for what lies far
 * ahead waits for the addresses of small ones. Page-aligned; a page exists, near the core that wrote it,
 * from its first write on. */
#ifndef PHASEWISE_PAGES_H
#define PHASEWISE_PAGES_H

#include <stdint.h>

/* Bytes in whole lines of a cache. */
static inline int64_t pw_whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Zeroed memory of `bytes` > 0, or NULL. */
void *pw_pages_open(int64_t bytes);
void pw_pages_close(void *pages, int64_t bytes);

/* Every page of these bytes exists from now on; what is written there stays. 0, or an errno where the system has no
 * more memory. */
int pw_pages_touch(char *begin, int64_t bytes);

#endif
