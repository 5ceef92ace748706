/* How messages pass through the slots of an exchange.
 *
 * For R ranks and messages of N bytes, what one rank moves in an all-reduce:
 *   each adds all   writes N into its slot, reads R N, writes N: one barrier a piece. For two ranks, and for messages so
 *                   small that a barrier is what they cost.
 *   each its share  writes N, reads N (the R-th part of every slot), writes N / R into its own slot, reads N, writes N:
 *                   rank r adds up part r of all (Sandwich 7.2). Piece k is added up before piece k + 1 is written,
 *                   and one barrier says both: P pieces take P + 1 barriers.
 * Both add every element in the order of ranks, so neither the way nor the size of a piece changes a bit. */
#include "dispatch.h"
#include "group/exchange.h"
#include "simd/common.h"

#include <stdbool.h>

enum {
    BLOCK = 512,           /* elements that are added up at a time: their sums stay in the first cache */
    SMALL_BYTES = 16384,   /* up to here, a second barrier costs more than to add up everything */
};

typedef enum { ALL_REDUCE, ALL_GATHER, BROADCAST, BARRIER } act;

/* The first line of a slot, where a call begins. */
typedef struct {
    int32_t act, detail; /* detail: the pw_addend, or the root */
    int64_t bytes;
} call;

static const int64_t ELEMENT_BYTES[PW_ADDS_COUNT] = {
    [PW_ADDS_F32] = 4, [PW_ADDS_F64] = 8, [PW_ADDS_BF16] = 2, [PW_ADDS_I32] = 4, [PW_ADDS_I64] = 8};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t pw_exchange_slots_bytes(int n_ranks, int64_t slot_bytes) { return n_ranks * PW_EXCHANGE_SLOTS * slot_bytes; }

/* ---- slots ------------------------------------------------------------------------------------------------------ */

static uint8_t *slot_of(const pw_exchange *x, int rank, uint64_t piece) {
    return x->slots + (rank * PW_EXCHANGE_SLOTS + (int64_t)(piece % PW_EXCHANGE_SLOTS)) * x->slot_bytes;
}

static uint8_t *bytes_of(const pw_exchange *x, int rank, uint64_t piece) {
    return slot_of(x, rank, piece) + PW_EXCHANGE_LINE;
}

static int64_t room(const pw_exchange *x) { return x->slot_bytes - PW_EXCHANGE_LINE; }

static void copy(void *to, const void *from, int64_t bytes) {
    if (bytes > 0 && to != from) memcpy(to, from, (size_t)bytes);
}

static int barrier(const pw_exchange *x, long timeout_ns) {
    return pw_group_barrier(x->group, x->rank, x->n_ranks, timeout_ns);
}

/* Every rank's first piece of a call is written: all meet, and see whether all make the same call. */
static int begin(pw_exchange *x, call made, long timeout_ns) {
    memcpy(slot_of(x, x->rank, x->piece), &made, sizeof made);
    int status = barrier(x, timeout_ns);
    if (status != PW_GROUP_OK) return status;
    for (int rank = 0; rank < x->n_ranks; ++rank) {
        if (memcmp(slot_of(x, rank, x->piece), slot_of(x, 0, x->piece), sizeof made) == 0) continue;
        ++x->piece; /* the same on every rank: the next call may go on */
        return PW_EXCHANGE_UNLIKE;
    }
    return PW_GROUP_OK;
}

/* ---- sums ------------------------------------------------------------------------------------------------------- */

#define ITSELF(v) (v)

/* outs = parts[0] + parts[1] + ..., in this order, in `wide`. The sum may be one of the parts. */
#define SUM(name, stored, wide, widened, narrowed)                                                                   \
    static void name(const uint8_t *const *parts, int n_parts, int64_t count, void *out) {                           \
        wide sums[BLOCK];                                                                                            \
        for (int64_t begin = 0; begin < count; begin += BLOCK) {                                                     \
            int64_t n = least(BLOCK, count - begin);                                                                 \
            const stored *first = (const stored *)(const void *)parts[0] + begin;                                    \
            for (int64_t i = 0; i < n; ++i) sums[i] = widened(first[i]);                                             \
            for (int p = 1; p < n_parts; ++p) {                                                                      \
                const stored *part = (const stored *)(const void *)parts[p] + begin;                                 \
                for (int64_t i = 0; i < n; ++i) sums[i] += widened(part[i]);                                         \
            }                                                                                                        \
            stored *to = (stored *)out + begin;                                                                      \
            for (int64_t i = 0; i < n; ++i) to[i] = (stored)narrowed(sums[i]);                                       \
        }                                                                                                            \
    }

SUM(sum_f64, double, double, ITSELF, ITSELF)
SUM(sum_bf16, uint16_t, float, pw_from_bf16, pw_to_bf16)
SUM(sum_i32, int32_t, uint32_t, ITSELF, ITSELF) /* wraps, as torch's sums do */
SUM(sum_i64, int64_t, uint64_t, ITSELF, ITSELF)

static void sum_f32(const uint8_t *const *parts, int n_parts, int64_t count, void *out) {
    if (count > 0) pw_active()->ops.sum(n_parts, (const float *const *)parts, count, out);
}

static void (*const SUMS[PW_ADDS_COUNT])(const uint8_t *const *, int, int64_t, void *) = {
    [PW_ADDS_F32] = sum_f32, [PW_ADDS_F64] = sum_f64, [PW_ADDS_BF16] = sum_bf16,
    [PW_ADDS_I32] = sum_i32, [PW_ADDS_I64] = sum_i64};

/* Bytes begin..end - 1 of a piece of every rank, added up into `out`. */
static void add_up(const pw_exchange *x, uint64_t piece, pw_addend type, int64_t begin, int64_t end, void *out) {
    const uint8_t *parts[PW_GROUP_MAX_RANKS];
    for (int rank = 0; rank < x->n_ranks; ++rank) parts[rank] = bytes_of(x, rank, piece) + begin;
    if (begin < end) SUMS[type](parts, x->n_ranks, (end - begin) / ELEMENT_BYTES[type], out);
}

/* ---- all-reduce ------------------------------------------------------------------------------------------------- */

/* A message on its way: how much of it is in a piece. */
typedef struct {
    uint8_t *data;
    int64_t bytes, room;
} message;

static int64_t pieces(const message *m) { return m->bytes > m->room ? (m->bytes + m->room - 1) / m->room : 1; }

static int64_t piece_bytes(const message *m, int64_t piece) { return least(m->room, m->bytes - piece * m->room); }

static int each_adds_all(pw_exchange *x, pw_addend type, const message *m, call made, long timeout_ns) {
    for (int64_t k = 0; k < pieces(m); ++k) {
        uint8_t *data = m->data + k * m->room;
        copy(bytes_of(x, x->rank, x->piece), data, piece_bytes(m, k));
        int status = k == 0 ? begin(x, made, timeout_ns) : barrier(x, timeout_ns);
        if (status != PW_GROUP_OK) return status;
        add_up(x, x->piece++, type, 0, piece_bytes(m, k), data);
    }
    return PW_GROUP_OK;
}

/* A piece in as many parts as there are ranks, whole lines: where part `rank` of it begins. */
static int64_t part_begin(const pw_exchange *x, int64_t bytes, int rank) {
    int64_t lines = (bytes + PW_EXCHANGE_LINE - 1) / PW_EXCHANGE_LINE;
    return least(bytes, (lines + x->n_ranks - 1) / x->n_ranks * rank * PW_EXCHANGE_LINE);
}

/* What every rank has added up of a piece, from its slot. */
static void take_parts(const pw_exchange *x, uint64_t piece, int64_t bytes, uint8_t *data) {
    for (int i = 0; i < x->n_ranks; ++i) {
        int rank = (x->rank + i) % x->n_ranks;
        int64_t from = part_begin(x, bytes, rank), to = part_begin(x, bytes, rank + 1);
        copy(data + from, bytes_of(x, rank, piece) + from, to - from);
    }
}

static int each_its_share(pw_exchange *x, pw_addend type, const message *m, call made, long timeout_ns) {
    copy(bytes_of(x, x->rank, x->piece), m->data, piece_bytes(m, 0));
    int status = begin(x, made, timeout_ns);
    for (int64_t k = 0; k < pieces(m) && status == PW_GROUP_OK; ++k, ++x->piece) {
        int64_t bytes = piece_bytes(m, k), from = part_begin(x, bytes, x->rank);
        add_up(x, x->piece, type, from, part_begin(x, bytes, x->rank + 1), bytes_of(x, x->rank, x->piece) + from);
        if (k + 1 < pieces(m))
            copy(bytes_of(x, x->rank, x->piece + 1), m->data + (k + 1) * m->room, piece_bytes(m, k + 1));
        status = barrier(x, timeout_ns);
        if (status != PW_GROUP_OK) return status;
        take_parts(x, x->piece, bytes, m->data + k * m->room);
    }
    return status;
}

int pw_exchange_all_reduce(pw_exchange *x, pw_addend type, int64_t count, void *data, long timeout_ns) {
    message m = {.data = data, .bytes = count * ELEMENT_BYTES[type], .room = room(x)};
    call made = {.act = ALL_REDUCE, .detail = (int32_t)type, .bytes = m.bytes};
    bool all = x->n_ranks == 2 || m.bytes <= SMALL_BYTES;
    return (all ? each_adds_all : each_its_share)(x, type, &m, made, timeout_ns);
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

int pw_exchange_all_gather(pw_exchange *x, int64_t bytes, const void *own, void *const *outs, long timeout_ns) {
    message m = {.bytes = bytes, .room = room(x)};
    call made = {.act = ALL_GATHER, .bytes = bytes};
    for (int64_t k = 0; k < pieces(&m); ++k, ++x->piece) {
        int64_t at = k * m.room, n = piece_bytes(&m, k);
        copy(bytes_of(x, x->rank, x->piece), (const uint8_t *)own + at, n);
        int status = k == 0 ? begin(x, made, timeout_ns) : barrier(x, timeout_ns);
        if (status != PW_GROUP_OK) return status;
        for (int i = 0; i < x->n_ranks; ++i) {
            int rank = (x->rank + i) % x->n_ranks;
            copy((uint8_t *)outs[rank] + at, bytes_of(x, rank, x->piece), n);
        }
    }
    return PW_GROUP_OK;
}

int pw_exchange_broadcast(pw_exchange *x, int root, int64_t bytes, void *data, long timeout_ns) {
    message m = {.data = data, .bytes = bytes, .room = room(x)};
    call made = {.act = BROADCAST, .detail = root, .bytes = bytes};
    for (int64_t k = 0; k < pieces(&m); ++k, ++x->piece) {
        uint8_t *here = m.data + k * m.room;
        if (x->rank == root) copy(bytes_of(x, root, x->piece), here, piece_bytes(&m, k));
        int status = k == 0 ? begin(x, made, timeout_ns) : barrier(x, timeout_ns);
        if (status != PW_GROUP_OK) return status;
        if (x->rank != root) copy(here, bytes_of(x, root, x->piece), piece_bytes(&m, k));
    }
    return PW_GROUP_OK;
}

int pw_exchange_barrier(pw_exchange *x, long timeout_ns) {
    int status = begin(x, (call){.act = BARRIER}, timeout_ns);
    x->piece += status == PW_GROUP_OK;
    return status;
}
