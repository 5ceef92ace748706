#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pages.h"

#include <stddef.h>
#include <sys/mman.h>

enum { PAGE_BYTES = 4096, HUGE_PAGE_BYTES = 1 << 21 };

typedef struct {
    volatile char *pages;
    int64_t bytes;
    int members;
} touching;

void *pw_pages_open(int64_t bytes) {
    void *pages = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    if (bytes >= HUGE_PAGE_BYTES) madvise(pages, (size_t)bytes, MADV_HUGEPAGE); /* refused: small pages serve too */
    return pages;
}

void pw_pages_close(void *pages, int64_t bytes) {
    if (pages) munmap(pages, (size_t)bytes);
}

static void touch_share(void *context, int member) {
    const touching *work = context;
    for (int64_t huge = member; huge * HUGE_PAGE_BYTES < work->bytes; huge += work->members)
        for (int64_t at = 0; at < HUGE_PAGE_BYTES && huge * HUGE_PAGE_BYTES + at < work->bytes; at += PAGE_BYTES)
            work->pages[huge * HUGE_PAGE_BYTES + at] = 0;
}

int pw_pages_touch(pw_team *team, void *pages, int64_t bytes) {
    touching work = {pages, bytes, pw_team_size(team)};
    return pw_team_run(team, touch_share, &work);
}
