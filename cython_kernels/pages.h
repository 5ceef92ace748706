/* Large zeroed memory straight from the kernel: page-aligned; a page exists, near the core that wrote it, from its
 * first write on. */
#ifndef PHASEWISE_PAGES_H
#define PHASEWISE_PAGES_H

#include <stdint.h>

typedef enum {
    PW_SMALL_PAGES, /* for memory that is used bit by bit, like a KV cache: until it is touched, only that is paid for */
    PW_HUGE_PAGES,  /* for scratch that every step walks through */
} pw_page_size;

/* Zeroed memory of `bytes` > 0, or NULL. */
void *pw_pages_open(int64_t bytes, pw_page_size size);
void pw_pages_close(void *pages, int64_t bytes);

/* Every page of these bytes exists from now on; what is written there stays. 0, or an errno where the system has no
 * more memory. */
int pw_pages_touch(char *begin, int64_t bytes);

#endif
