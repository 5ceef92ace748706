/* Large zeroed memory straight from the kernel: page-aligned, with huge pages asked for, touched where it is used. */
#ifndef PHASEWISE_PAGES_H
#define PHASEWISE_PAGES_H

#include <stdint.h>

#include "team.h"

/* Zeroed memory of `bytes` > 0, or NULL. */
void *pw_pages_open(int64_t bytes);
void pw_pages_close(void *pages, int64_t bytes);

/* Every member writes to its share of the pages, so that they exist and lie near the cores that use them. */
int pw_pages_touch(pw_team *team, void *pages, int64_t bytes);

#endif
