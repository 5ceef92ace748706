/* Sparse storage of bf16 and q8 weights: a bit for every weight, and the values of those that are kept.
 *
 * It is storage alone: expanded, a panel is byte for byte the dense one, so that every product has the bits of the dense
 * weight. A weight that is not kept is 0 (bf16), or zero_point (q8).
 *
 * A panel is cut into slots of 64 inputs (the last one may have 32). A slot is, in this order:
 *     masks    for each vector row, 64 bytes of the dense panel: uint32 (bf16) or uint64 (q8), bit i for its element i
 *     values   the elements whose bits are set, in order: 2 bytes (bf16) or 1 (q8) each
 *     padding  zero bytes up to a multiple of 2
 * Slots lie one after another, panel by panel, and offsets[panel][slot] * 2 is where a slot begins, so that any range
 * of panels and any range of inputs can be read by itself: thread grids, parts of k and ranks are as free as for dense
 * weights. After the last slot come PW_SPARSE_TAIL zero bytes: whatever the masks say, a kernel that begins at a slot
 * reads no byte beyond them. */
#ifndef PHASEWISE_SPARSE_H
#define PHASEWISE_SPARSE_H

#include "gemm.h"

enum {
    PW_SLOT_INPUTS = 64,
    PW_SLOT_UNIT = 2,                                      /* bytes that offsets count in */
    PW_SLOT_MASK_BYTES = PW_SLOT_INPUTS * PW_PANEL / 8,    /* 128, of either kind */
    PW_SPARSE_TAIL = PW_SLOT_MASK_BYTES + 2 * PW_SLOT_INPUTS * PW_PANEL + 64, /* the largest slot and an over-read */
};

static inline int pw_can_be_sparse(int32_t kind) { return kind == PW_BF16 || kind == PW_Q8; }
static inline int64_t pw_sparse_slots(int64_t k) { return (k + PW_SLOT_INPUTS - 1) / PW_SLOT_INPUTS; }

/* Bytes of an element. */
static inline int pw_element_bytes(int32_t kind) { return kind == PW_BF16 ? 2 : 1; }

/* What packing and checking are told: dense panels in, or a stream and offsets. */
typedef struct {
    int32_t kind, zero_point;
    int64_t panels, k; /* k before padding */
} pw_sparse_shape;

/* Packs dense panels. stream: NULL to measure only, or what the slots are written to; offsets count from `at`, the
 * bytes of the panels before these. *kept: weights that are kept. Returns the bytes of these panels, without a tail;
 * -1 where an offset would not fit. */
int64_t pw_sparse_pack(const pw_sparse_shape *shape, const void *dense, int64_t at, uint8_t *stream, uint32_t *offsets,
                       int64_t *kept);

/* Dense panels of a stream that has been checked. */
void pw_sparse_unpack(const pw_sparse_shape *shape, const uint8_t *stream, const uint32_t *offsets, void *dense);

/* NULL, or what is wrong with a stream of `bytes` bytes, tail included, that may say anything. *kept as above. */
const char *pw_sparse_problem(const pw_sparse_shape *shape, const uint8_t *stream, int64_t bytes,
                              const uint32_t *offsets, int64_t *kept);

/* Of a byte of mask bits: where the eight elements lie among the kept ones, 128 for those that are not kept. */
extern const uint8_t pw_word_places[256][16]; /* of two bytes each */
extern const uint8_t pw_byte_places[256][8];

#endif
