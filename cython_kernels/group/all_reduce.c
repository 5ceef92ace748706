/* All-reduces over buffers that lie in shared memory, so that nothing is copied into a place of exchange first.
 *
 * For R ranks and messages of N bytes, what one rank moves and what it waits for:
 *   rank-shifted   reads N, writes N: of each buffer its own R-th, all ranks at the same time; 2 barriers.
 *   master copies  the last rank's sum has waited for R - 1 ranks before it, each of which read 2 N and wrote N; then
 *                  each reads and writes N once more, while the master waits.
 *   ring           reads 3 N (R - 1) / R, writes 2 N (R - 1) / R, in 2 (R - 1) steps, each after its left neighbour's.
 *
 * A rank overwrites a chunk in place only when every rank that needs what was there has read it: rank-shifted, a chunk
 * has one rank that reads it everywhere and writes it everywhere; master copies, ranks take turns; ring, at the place
 * where it is shown. tests/cython_kernels/programs/group_model.c walks through every interleaving of this code. */
#include "dispatch.h"
#include "group/group.h"

#include <stddef.h>
#include <string.h>

enum {
    LINE_FLOATS = 16,     /* of a cache line: ranks that wrote to one line would take it from one another */
    SMALLEST_CHUNK = 256, /* floats; below it, to share the work costs more than it saves (decision 0013) */
};

/* One call, as one rank sees it. */
typedef struct {
    pw_group *group;
    int rank, n_ranks;
    float *const *buffers;
    int64_t floats, chunk;
    long timeout_ns;
} reduction;

/* The message in as many chunks as there are ranks, or fewer: whole lines, all but the last of one size. */
static int64_t chunk_floats(int64_t floats, int n_ranks) {
    int64_t share = (floats + n_ranks - 1) / n_ranks;
    int64_t lines = (share + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
    return lines > SMALLEST_CHUNK ? lines : SMALLEST_CHUNK;
}

static int64_t chunk_begin(const reduction *r, int64_t chunk) {
    int64_t begin = chunk * r->chunk;
    return begin < r->floats ? begin : r->floats;
}

/* The sum of n_parts buffers into n_outs buffers, elements begin..end - 1. */
static void sum_into(const float *const *parts, int n_parts, float *const *outs, int n_outs, int64_t begin,
                     int64_t end) {
    pw_sum sum = {.parts = parts, .outs = outs, .n_parts = n_parts, .n_outs = n_outs};
    if (begin < end) pw_active()->ops.sum(&sum, begin, end);
}

static void copy(const float *from, float *to, int64_t begin, int64_t end) {
    if (begin < end) memcpy(to + begin, from + begin, sizeof(float) * (size_t)(end - begin));
}

static int await(const reduction *r, int awaited, uint32_t arrivals) {
    return pw_group_await(r->group, r->rank, r->n_ranks, awaited, arrivals, r->timeout_ns);
}

static uint32_t arrive(const reduction *r) { return pw_group_arrive(r->group, r->rank, r->n_ranks); }

static int barrier(const reduction *r) { return pw_group_barrier(r->group, r->rank, r->n_ranks, r->timeout_ns); }

/* ---- rank-shifted ----------------------------------------------------------------------------------------------- */

/* Each rank begins at its own chunk, so that no two ever meet, and is done when it has gone round: with as many chunks
 * as ranks, after the first. */
static int rank_shifted(const reduction *r) {
    int status = barrier(r);
    if (status != PW_GROUP_OK) return status;
    sum_into((const float *const *)r->buffers, r->n_ranks, r->buffers, r->n_ranks, chunk_begin(r, r->rank),
             chunk_begin(r, r->rank + 1));
    return barrier(r);
}

/* ---- master copies ---------------------------------------------------------------------------------------------- */

/* The master's buffer is where the others add theirs, one after another; then they copy what it holds. */
static int master_copies(const reduction *r) {
    float *sum = r->buffers[0], *own = r->buffers[r->rank];
    uint32_t added = pw_group_arrivals(r->group, r->rank, r->n_ranks) + 1;
    int status = r->rank == 0 ? PW_GROUP_OK : await(r, r->rank - 1, added);
    if (status != PW_GROUP_OK) return status;
    if (r->rank > 0) sum_into((const float *const[]){sum, own}, 2, &sum, 1, 0, r->floats);
    arrive(r);
    status = await(r, r->n_ranks - 1, added);
    if (status != PW_GROUP_OK) return status;
    if (r->rank == 0) return barrier(r); /* its buffer is not its own before all have copied it */
    copy(sum, own, 0, r->floats);
    arrive(r);
    return PW_GROUP_OK;
}

/* ---- ring ------------------------------------------------------------------------------------------------------- */

/* Once round to add: what the left neighbour has of a chunk, and one's own. Once more round to copy the finished ones. */
static int ring(const reduction *r) {
    int n = r->n_ranks, left = (r->rank + n - 1) % n, right = (r->rank + 1) % n;
    float *own = r->buffers[r->rank];
    const float *theirs = r->buffers[left];
    uint32_t shown = arrive(r);
    for (int step = 0; step < 2 * (n - 1); ++step) {
        int chunk = (r->rank + 2 * n - 1 - step) % n;
        int status = await(r, left, shown);
        if (status != PW_GROUP_OK) return status;
        if (step < n - 1)
            sum_into((const float *const[]){theirs, own}, 2, &own, 1, chunk_begin(r, chunk), chunk_begin(r, chunk + 1));
        else
            copy(theirs, own, chunk_begin(r, chunk), chunk_begin(r, chunk + 1));
        shown = arrive(r);
    }
    return await(r, right, shown); /* it has read what it copies from here */
}

/* ---- one call --------------------------------------------------------------------------------------------------- */

int pw_all_reduce(pw_group *group, int rank, int n_ranks, float *const *buffers, int64_t floats,
                  pw_all_reduce_kind kind, long timeout_ns) {
    reduction r = {group, rank, n_ranks, buffers, floats, chunk_floats(floats, n_ranks), timeout_ns};
    if (pw_group_failed(group)) return PW_GROUP_FAILED;
    if (n_ranks == 1 || floats == 0) return PW_GROUP_OK;
    if (kind == PW_MASTER_COPIES) return master_copies(&r);
    if (kind == PW_RING) return ring(&r);
    return rank_shifted(&r);
}
