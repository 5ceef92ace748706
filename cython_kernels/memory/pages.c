#define _GNU_SOURCE
#include "memory/pages.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

void *pw_pages_open(int64_t bytes) {
    void *pages = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    madvise(pages, (size_t)bytes, MADV_HUGEPAGE); /* if refused, small pages serve too */
    return pages;
}

void pw_pages_close(void *pages, int64_t bytes) {
    if (pages) munmap(pages, (size_t)bytes);
}

static void write_what_is_there(char *begin, const char *end, int64_t page) {
    for (; begin < end; begin += page) __atomic_fetch_or(begin, 0, __ATOMIC_RELAXED);
}

int pw_pages_touch(char *begin, int64_t bytes) {
    int64_t page = sysconf(_SC_PAGESIZE);
    char *first = begin - (uintptr_t)begin % (uintptr_t)page;
    while (madvise(first, (size_t)(begin + bytes - first), MADV_POPULATE_WRITE) != 0) {
        if (errno == EINVAL) { /* an older kernel: where there is too little memory it kills, and cannot say so */
            write_what_is_there(first, begin + bytes, page);
            return 0;
        }
        if (errno != EAGAIN && errno != EINTR) return errno;
    }
    return 0;
}
