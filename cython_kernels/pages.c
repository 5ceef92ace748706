#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pages.h"

#include <stddef.h>
#include <sys/mman.h>

void *pw_pages_open(int64_t bytes, pw_page_size size) {
    void *pages = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    if (size == PW_HUGE_PAGES) madvise(pages, (size_t)bytes, MADV_HUGEPAGE); /* if refused, small pages serve too */
    return pages;
}

void pw_pages_close(void *pages, int64_t bytes) {
    if (pages) munmap(pages, (size_t)bytes);
}
