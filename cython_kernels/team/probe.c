#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "team/probe.h"

#include "dispatch.h"
#include "memory/pages.h"
#include "team/waiting.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define APART 128             /* two lines: prefetchers fetch lines in pairs */
#define POLLS 4096            /* between two looks at the clock, which would disturb what is timed */
#define GATE_NS 20000000L     /* how long readers wait for one another; a host that is later spoils the sample only */
#define CHUNK_BYTES (1 << 18) /* read between two looks at the clock */
#define CHUNK_ROUNDS (1 << 12)

/* ---- a line handed back and forth ------------------------------------------------------------------------------- */

typedef struct {
    _Alignas(APART) atomic_uint ball; /* odd: member 1 has to answer, even: member 0 */
    _Alignas(APART) atomic_bool late;
    _Alignas(APART) int rounds, trips, done;
    long deadline;
    double *one_way_ns;
} pass_task;

/* False once the deadline has passed for either side. Polls without pausing: a pause is as long as what is timed. */
static bool wait_for_ball(pass_task *task, unsigned wanted) {
    for (;;) {
        for (int i = 0; i < POLLS; ++i)
            if (atomic_load_explicit(&task->ball, memory_order_acquire) == wanted) return true;
        if (atomic_load_explicit(&task->late, memory_order_relaxed)) return false;
        if (now_ns() >= task->deadline) {
            atomic_store(&task->late, true);
            return false;
        }
    }
}

static bool serve_round(pass_task *task, unsigned *ball) {
    for (int trip = 0; trip < task->trips; ++trip, *ball += 2) {
        atomic_store_explicit(&task->ball, *ball + 1, memory_order_release);
        if (!wait_for_ball(task, *ball + 2)) return false;
    }
    return true;
}

static void serve(pass_task *task) {
    unsigned ball = 0;
    if (!serve_round(task, &ball)) return; /* waits until the other is there, and warms up */
    while (task->done < task->rounds) {
        long began = now_ns();
        if (!serve_round(task, &ball)) return;
        task->one_way_ns[task->done++] = (double)(now_ns() - began) / (2.0 * task->trips);
    }
}

static void answer(pass_task *task) {
    unsigned last = 2u * (unsigned)task->trips * (unsigned)(task->rounds + 1);
    for (unsigned ball = 0; ball != last; ball += 2) {
        if (!wait_for_ball(task, ball + 1)) return;
        atomic_store_explicit(&task->ball, ball + 2, memory_order_release);
    }
}

static void pass(void *context, int member) {
    if (member == 0) serve(context);
    if (member == 1) answer(context);
}

int pw_probe_pass(pw_team *team, int rounds, int trips, long timeout_ns, double *one_way_ns) {
    pass_task task = {.rounds = rounds, .trips = trips, .deadline = now_ns() + timeout_ns, .one_way_ns = one_way_ns};
    int status = pw_team_run(team, pass, &task);
    return status == PW_TEAM_OK ? task.done : status;
}

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
