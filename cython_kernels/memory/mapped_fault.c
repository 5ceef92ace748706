/* Everything in the handler is safe in a signal handler (POSIX.1-2017, 2.4.3): it reads memory that was
 * written before, writes to a descriptor and ends. */
#define _GNU_SOURCE
#include "memory/mapped_fault.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { WATCHED = 16 };

typedef struct {
    const char *start;
    size_t n_bytes;
    size_t n_message;
    char message[MAPPED_FAULT_MESSAGE_BYTES];
} mapping;

static mapping watched[WATCHED];
static atomic_uint n_watched;
static struct sigaction before;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)number;
    (void)context;
    const char *at = info->si_addr;
    unsigned n = atomic_load(&n_watched);
    for (unsigned i = 0; i < (n < WATCHED ? n : WATCHED); ++i) {
        const mapping *one = &watched[i];
        if (at >= one->start && at < one->start + one->n_bytes) {
            ssize_t n_written = write(STDERR_FILENO, one->message, one->n_message);
            (void)n_written;
            _exit(MAPPED_FAULT_EXIT);
        }
    }
    sigaction(SIGBUS, &before, NULL); /* the instruction is tried again, and faults into what was there */
}

int pw_watch_mapping(const void *start, size_t n_bytes, const char *message) {
    unsigned n = atomic_load(&n_watched);
    mapping *one = &watched[n % WATCHED];
    one->n_bytes = 0; /* nothing is in it while it changes */
    one->start = start;
    one->n_message = strnlen(message, sizeof one->message);
    memcpy(one->message, message, one->n_message);
    one->n_bytes = n_bytes;
    atomic_store(&n_watched, n + 1 == 2 * WATCHED ? WATCHED : n + 1);
    if (n > 0) return 0;
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, &before) == 0 ? 0 : errno;
}
