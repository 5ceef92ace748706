/* Packing, unpacking and checking of sparse weights; tables for instruction sets that do not expand by themselves. */
#include "sparse.h"

#include <string.h>

enum { VECTOR_ROW_BYTES = 64, UNIT_MASK = PW_SLOT_UNIT - 1 };

/* ---- tables ----------------------------------------------------------------------------------------------------- */

#define RANK(m, i) __builtin_popcount((m) & ((1 << (i)) - 1))
#define WORD(m, i) (m) >> (i) & 1 ? 2 * RANK(m, i) : 128, (m) >> (i) & 1 ? 2 * RANK(m, i) + 1 : 128
#define BYTE(m, i) (m) >> (i) & 1 ? RANK(m, i) : 128
#define WORDS(m) {WORD(m, 0), WORD(m, 1), WORD(m, 2), WORD(m, 3), WORD(m, 4), WORD(m, 5), WORD(m, 6), WORD(m, 7)},
#define BYTES(m) {BYTE(m, 0), BYTE(m, 1), BYTE(m, 2), BYTE(m, 3), BYTE(m, 4), BYTE(m, 5), BYTE(m, 6), BYTE(m, 7)},
#define FOUR(X, m) X(m) X((m) + 1) X((m) + 2) X((m) + 3)
#define SIXTEEN(X, m) FOUR(X, m) FOUR(X, (m) + 4) FOUR(X, (m) + 8) FOUR(X, (m) + 12)
#define SIXTY_FOUR(X, m) SIXTEEN(X, m) SIXTEEN(X, (m) + 16) SIXTEEN(X, (m) + 32) SIXTEEN(X, (m) + 48)
#define EVERY(X) SIXTY_FOUR(X, 0) SIXTY_FOUR(X, 64) SIXTY_FOUR(X, 128) SIXTY_FOUR(X, 192)

const uint8_t pw_word_places[256][16] = {EVERY(WORDS)};
const uint8_t pw_byte_places[256][8] = {EVERY(BYTES)};

/* ---- slots ------------------------------------------------------------------------------------------------------ */

/* Vector rows of slot `slot` of a panel. */
static int rows_of_slot(const pw_sparse_shape *s, int64_t slot) {
    int64_t inputs = pw_padded_k(s->k) - slot * PW_SLOT_INPUTS;
    return (int)((inputs < PW_SLOT_INPUTS ? inputs : PW_SLOT_INPUTS) / pw_inputs_of_row(s->kind));
}

static int mask_bytes(int32_t kind) { return VECTOR_ROW_BYTES / pw_element_bytes(kind) / 8; }

static uint64_t mask_at(const uint8_t *masks, int bytes, int row) {
    uint32_t narrow;
    uint64_t wide;
    memcpy(&narrow, masks + row * bytes, sizeof narrow);
    if (bytes == sizeof narrow) return narrow;
    memcpy(&wide, masks + row * bytes, sizeof wide);
    return wide;
}

static uint64_t mask_of(const pw_sparse_shape *s, const uint8_t *vector_row) {
    uint64_t mask = 0;
    if (s->kind == PW_Q8) {
        for (int i = 0; i < VECTOR_ROW_BYTES; ++i) mask |= (uint64_t)(vector_row[i] != s->zero_point) << i;
        return mask;
    }
    for (int i = 0; i < VECTOR_ROW_BYTES / 2; ++i)
        mask |= (uint64_t)((vector_row[2 * i] | vector_row[2 * i + 1]) != 0) << i;
    return mask;
}

static int64_t rounded(int64_t bytes) { return (bytes + UNIT_MASK) & ~(int64_t)UNIT_MASK; }

/* Bytes that the slot takes, and of these without the padding. */
static int64_t pack_slot(const pw_sparse_shape *s, const uint8_t *dense, int rows, uint8_t *to, int64_t *kept) {
    int of_mask = mask_bytes(s->kind), element = pw_element_bytes(s->kind);
    int64_t at = (int64_t)rows * of_mask;
    for (int row = 0; row < rows; ++row, dense += VECTOR_ROW_BYTES) {
        uint64_t mask = mask_of(s, dense);
        *kept += __builtin_popcountll(mask);
        if (!to) {
            at += (int64_t)__builtin_popcountll(mask) * element;
            continue;
        }
        memcpy(to + row * of_mask, &mask, (size_t)of_mask); /* little-endian, as all that we run on */
        for (uint64_t left = mask; left; left &= left - 1, at += element)
            memcpy(to + at, dense + __builtin_ctzll(left) * element, (size_t)element);
    }
    if (to) memset(to + at, 0, (size_t)(rounded(at) - at));
    return rounded(at);
}

int64_t pw_sparse_pack(const pw_sparse_shape *s, const void *dense, int64_t at, uint8_t *stream, uint32_t *offsets,
                       int64_t *kept) {
    int64_t slots = pw_sparse_slots(s->k), begin = at;
    const uint8_t *from = dense;
    *kept = 0;
    for (int64_t i = 0; i < s->panels * slots; ++i) {
        int rows = rows_of_slot(s, i % slots);
        if (at / PW_SLOT_UNIT > UINT32_MAX) return -1;
        if (offsets) offsets[i] = (uint32_t)(at / PW_SLOT_UNIT);
        at += pack_slot(s, from, rows, stream ? stream + (at - begin) : NULL, kept);
        from += rows * VECTOR_ROW_BYTES;
    }
    return at - begin;
}

void pw_sparse_unpack(const pw_sparse_shape *s, const uint8_t *stream, const uint32_t *offsets, void *dense) {
    int64_t slots = pw_sparse_slots(s->k);
    int of_mask = mask_bytes(s->kind), element = pw_element_bytes(s->kind);
    uint8_t *to = dense;
    for (int64_t i = 0; i < s->panels * slots; ++i) {
        const uint8_t *masks = stream + (int64_t)offsets[i] * PW_SLOT_UNIT;
        int rows = rows_of_slot(s, i % slots);
        const uint8_t *value = masks + rows * of_mask;
        for (int row = 0; row < rows; ++row, to += VECTOR_ROW_BYTES) {
            memset(to, s->kind == PW_Q8 ? s->zero_point : 0, VECTOR_ROW_BYTES);
            for (uint64_t left = mask_at(masks, of_mask, row); left; left &= left - 1, value += element)
                memcpy(to + __builtin_ctzll(left) * element, value, (size_t)element);
        }
    }
}

const char *pw_sparse_problem(const pw_sparse_shape *s, const uint8_t *stream, int64_t bytes, const uint32_t *offsets,
                              int64_t *kept) {
    int64_t slots = pw_sparse_slots(s->k), end = bytes - PW_SPARSE_TAIL, at = 0;
    int of_mask = mask_bytes(s->kind), element = pw_element_bytes(s->kind);
    *kept = 0;
    for (int64_t i = 0; i < s->panels * slots; ++i) {
        int rows = rows_of_slot(s, i % slots);
        if ((int64_t)offsets[i] * PW_SLOT_UNIT != at) return "an offset is not where the slot before it ends";
        if (at + rows * of_mask > end) return "the masks go on beyond the end";
        int64_t count = 0;
        for (int row = 0; row < rows; ++row) count += __builtin_popcountll(mask_at(stream + at, of_mask, row));
        at = rounded(at + rows * of_mask + count * element);
        if (at > end) return "the masks count more values than there are";
        *kept += count;
    }
    return at == end ? NULL : "there are more bytes than the masks count";
}
