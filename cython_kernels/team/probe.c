#include "team/probe.h"

#include "dispatch.h"
#include "memory/pages.h"
#include "team/waiting.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define GATE_NS 20000000L     /* how long readers wait for one another; a host that is later spoils the sample only */
#define CHUNK_BYTES (1 << 18) /* read between two looks at the clock */
#define CHUNK_ROUNDS (1 << 12)

/* ---- reading at once -------------------------------------------------------------------------------------------- */

struct pw_readers {
    pw_team *team;
    int n;
    int64_t bytes;
    char **buffers;
    atomic_int ready;
    int n_active;
    const bool *active;
    long duration_ns;
    double *bytes_per_s;
};

static void touch(void *context, int member) {
    pw_readers *readers = context;
    char *buffer = pw_pages_open(readers->bytes);
    if (buffer) memset(buffer, 1, (size_t)readers->bytes);
    readers->buffers[member] = buffer;
}

static void wait_for_all(atomic_int *ready, int n_active) {
    long deadline = now_ns() + GATE_NS;
    atomic_fetch_add(ready, 1);
    while (atomic_load_explicit(ready, memory_order_acquire) < n_active)
        if (now_ns() >= deadline) return;
}

static void stream(void *context, int member) {
    pw_readers *readers = context;
    if (!readers->active[member]) return;
    uint64_t (*read)(const void *, size_t) = pw_active()->limits.read;
    uint64_t done = 0;
    int64_t offset = 0;
    wait_for_all(&readers->ready, readers->n_active);
    long began = now_ns(), now;
    do {
        done += read(readers->buffers[member] + offset, CHUNK_BYTES);
        offset = (offset + CHUNK_BYTES) % readers->bytes;
        now = now_ns();
    } while (now - began < readers->duration_ns);
    readers->bytes_per_s[member] = (double)done / (double)(now - began) * 1e9;
}

pw_readers *pw_readers_open(pw_team *team, int64_t bytes) {
    pw_readers *readers = calloc(1, sizeof *readers);
    if (!readers) return NULL;
    readers->team = team;
    readers->bytes = bytes;
    readers->n = pw_team_size(team);
    readers->buffers = calloc((size_t)readers->n, sizeof *readers->buffers);
    bool is_open = readers->buffers && pw_team_run(team, touch, readers) == PW_TEAM_OK;
    for (int i = 0; is_open && i < readers->n; ++i) is_open = readers->buffers[i] != NULL;
    if (is_open) return readers;
    pw_readers_close(readers);
    return NULL;
}

int pw_readers_run(pw_readers *readers, const bool *active, long duration_ns, double *bytes_per_s) {
    readers->active = active;
    readers->duration_ns = duration_ns;
    readers->bytes_per_s = bytes_per_s;
    readers->n_active = 0;
    atomic_store(&readers->ready, 0);
    for (int i = 0; i < readers->n; ++i) {
        bytes_per_s[i] = 0;
        readers->n_active += active[i];
    }
    return pw_team_run(readers->team, stream, readers);
}

void pw_readers_close(pw_readers *readers) {
    if (!readers) return;
    for (int i = 0; readers->buffers && i < readers->n; ++i) pw_pages_close(readers->buffers[i], readers->bytes);
    free(readers->buffers);
    free(readers);
}

/* ---- arithmetic at once ----------------------------------------------------------------------------------------- */

typedef struct {
    atomic_int ready;
    int n;
    long duration_ns;
    double *operations_per_s;
} pace_task;

static void multiply_and_add(void *context, int member) {
    pace_task *task = context;
    uint64_t (*loop)(uint64_t) = pw_active()->limits.f32;
    uint64_t done = 0;
    wait_for_all(&task->ready, task->n);
    long began = now_ns(), now;
    do {
        done += loop(CHUNK_ROUNDS);
        now = now_ns();
    } while (now - began < task->duration_ns);
    task->operations_per_s[member] = (double)done / (double)(now - began) * 1e9;
}

int pw_probe_pace(pw_team *team, long duration_ns, double *operations_per_s) {
    pace_task task = {.n = pw_team_size(team), .duration_ns = duration_ns, .operations_per_s = operations_per_s};
    return pw_team_run(team, multiply_and_add, &task);
}
