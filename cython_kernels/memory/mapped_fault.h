/* What happens when a page of a mapped file cannot be read: the file was cut short, or its disk failed. */
#ifndef PHASEWISE_MAPPED_FAULT_H
#define PHASEWISE_MAPPED_FAULT_H

#include <stddef.h>

enum { MAPPED_FAULT_EXIT = 70, MAPPED_FAULT_MESSAGE_BYTES = 1024 };

/* From now on a SIGBUS within [start, start + n_bytes) writes `message` to stderr and ends the process with
 * MAPPED_FAULT_EXIT. One elsewhere does what it did before. Only the last 16 mappings are watched.
 * Returns 0, or an errno where no handler can be set. Not for several threads at once. */
int pw_watch_mapping(const void *start, size_t n_bytes, const char *message);

#endif
