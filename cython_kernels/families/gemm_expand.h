/* families/gemm_expand.h: sparse panels (sparse.h) back to dense ones, a few vector rows at a time.
 *
 * Expanding copies bits, so that what is computed from it is what the dense weight gives. Where the core has AVX-512
 * VBMI2 one instruction expands a vector row: it moves the kept elements to where the mask has bits. Elsewhere a
 * shuffle does so for eight elements, by the places that a table gives for eight bits of the mask. */
#ifndef PHASEWISE_FAMILIES_GEMM_EXPAND_H
#define PHASEWISE_FAMILIES_GEMM_EXPAND_H

#include "cpu.h"
#include "families/gemm_tiles.h"
#include "sparse.h"

enum { EXPANDED_BYTES = 64 << 10, STREAMED_BYTES = 16 << 10 };

/* Where vector rows of one panel are read. */
typedef struct {
    const uint8_t *stream;
    const uint32_t *offsets; /* of the panel's slots */
    int32_t kind, zero_point;
    int64_t padded_k;
    int64_t ahead; /* bytes from what is read to what is asked for; 0: nothing is */
    int64_t end, jump; /* from this byte of the stream on, what is asked for is `jump` bytes further */
} sparse_panel;

PW_INLINE uint64_t row_mask(int kind, const uint8_t *masks, int64_t row) {
    uint32_t narrow;
    uint64_t wide;
    if (kind == PW_BF16) {
        memcpy(&narrow, masks + 4 * row, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, masks + 8 * row, sizeof wide);
    return wide;
}

PW_INLINE int64_t kept_bytes(int kind, uint64_t mask) { return __builtin_popcountll(mask) * (kind == PW_BF16 ? 2 : 1); }

#ifdef PW_EXPAND_WORDS
PW_INLINE void expand_row(int kind, uint64_t mask, const uint8_t *values, vi zero, uint8_t *out) {
    vi_store(out, kind == PW_BF16 ? expand_words(zero, (uint32_t)mask, values) : expand_bytes(zero, mask, values));
}
#endif

/* Eight elements at a time. */
PW_INLINE void expand_row_by_table(int kind, uint64_t mask, const uint8_t *values, int zero, uint8_t *out) {
    for (int i = 0; i < (kind == PW_BF16 ? 4 : 8); ++i, mask >>= 8) {
        unsigned eight = mask & 255;
#ifdef PW_SHUFFLE_WORDS
        if (kind == PW_BF16) shuffle_16(values, pw_word_places[eight], out + 16 * i);
        else shuffle_8(values, pw_byte_places[eight], zero, out + 8 * i);
#else
        uint64_t filled = UINT64_C(0x0101010101010101) * (unsigned)zero;
        memcpy(out + 8 * i * (kind == PW_BF16 ? 2 : 1), &filled, 8);
        if (kind == PW_BF16) memcpy(out + 16 * i + 8, &filled, 8);
        for (unsigned left = eight, n = 0; left; left &= left - 1, ++n) {
            int at = __builtin_ctz(left);
            if (kind == PW_BF16) memcpy(out + 16 * i + 2 * at, values + 2 * n, 2);
            else out[8 * i + at] = values[n];
        }
#endif
        values += kept_bytes(kind, eight);
    }
}

/* Where a slot of a panel is read: its masks, the values of its next vector row, and how far ahead to ask. */
typedef struct {
    const uint8_t *masks, *values;
    int64_t ahead;
} sparse_slot;

/* Slot `slot` of a panel from vector row `row` of the slot on. */
PW_INLINE sparse_slot sparse_slot_of(const sparse_panel *p, int kind, int64_t slot, int64_t row) {
    int64_t inputs = p->padded_k - slot * PW_SLOT_INPUTS, at = (int64_t)p->offsets[slot] * PW_SLOT_UNIT;
    int64_t rows = (inputs < PW_SLOT_INPUTS ? inputs : PW_SLOT_INPUTS) / pw_inputs_of_row(kind);
    sparse_slot s = {.masks = p->stream + at, .ahead = p->ahead + (at + p->ahead >= p->end ? p->jump : 0)};
    s.values = s.masks + rows * (kind == PW_BF16 ? 4 : 8);
    for (int64_t before = 0; before < row; ++before) s.values += kept_bytes(kind, row_mask(kind, s.masks, before));
    if (s.ahead && row == 0) {
        __builtin_prefetch(s.masks + s.ahead);
        __builtin_prefetch(s.masks + s.ahead + VECTOR_ROW_BYTES);
    }
    return s;
}

/* Vector rows `row` to `end` of one slot. */
PW_INLINE uint8_t *expand_slot(const sparse_panel *p, int kind, int native, int64_t slot, int64_t row, int64_t end,
                               uint8_t *out) {
    sparse_slot from = sparse_slot_of(p, kind, slot, row);
    const uint8_t *masks = from.masks, *values = from.values;
    int64_t ahead = from.ahead;
#ifdef PW_EXPAND_WORDS
    vi zero = vi_set1(kind == PW_BF16 ? 0 : (int32_t)((unsigned)p->zero_point * 0x01010101u));
#endif
    for (; row < end; ++row, out += VECTOR_ROW_BYTES) {
        uint64_t mask = row_mask(kind, masks, row);
        if (ahead) __builtin_prefetch(values + ahead);
#ifdef PW_EXPAND_WORDS
        if (native) expand_row(kind, mask, values, zero, out);
        else
#endif
            expand_row_by_table(kind, mask, values, kind == PW_BF16 ? 0 : p->zero_point, out);
        values += kept_bytes(kind, mask);
    }
    (void)native;
    return out;
}

PW_INLINE void expand_rows_of(const sparse_panel *p, int kind, int native, int64_t first, int64_t count, uint8_t *out) {
    int64_t rows = PW_SLOT_INPUTS / pw_inputs_of_row(kind);
    for (int64_t row = first, end = first + count, next; row < end; row = next) {
        next = (row / rows + 1) * rows < end ? (row / rows + 1) * rows : end;
        out = expand_slot(p, kind, native, row / rows, row % rows, row % rows + next - row, out);
    }
}

/* `count` vector rows of a panel from row `first` on, to out. */
static inline void expand_rows(const sparse_panel *p, int64_t first, int64_t count, uint8_t *out) {
    int native = 0;
#ifdef PW_EXPAND_WORDS
    native = pw_cpu_expands();
#endif
    if (p->kind == PW_BF16 && native) expand_rows_of(p, PW_BF16, 1, first, count, out);
    else if (p->kind == PW_BF16) expand_rows_of(p, PW_BF16, 0, first, count, out);
    else if (native) expand_rows_of(p, PW_Q8, 1, first, count, out);
    else expand_rows_of(p, PW_Q8, 0, first, count, out);
}

/* Panel `panel` of a weight. What is asked for beyond its end is that of the panel `stride` panels further. */
static inline sparse_panel sparse_panel_of(const pw_weight *w, int64_t panel, int64_t stride, int64_t ahead) {
    int64_t slots = pw_sparse_slots(w->k), panels = pw_panels(w->n), end = INT64_MAX, jump = 0;
    if (panel + 1 < panels) end = (int64_t)w->offsets[(panel + 1) * slots] * PW_SLOT_UNIT;
    if (panel + stride < panels) jump = (int64_t)w->offsets[(panel + stride) * slots] * PW_SLOT_UNIT - end;
    return (sparse_panel){w->values, w->offsets + panel * slots, w->kind, w->zero_point, pw_padded_k(w->k), ahead, end, jump};
}

#ifdef PW_EXPAND_WORDS

/* The panels of a tile, and the slots of them that are being read. */
typedef struct {
    sparse_panel panels[MAX_TILE_PANELS];
    sparse_slot at[MAX_TILE_PANELS];
    vi zero; /* a vector row of which nothing is kept */
} sparse_reader;

/* Slot `slot` of each panel from vector row `row` of the slot on. */
PW_INLINE void read_slot(sparse_reader *in, int kind, int np, int64_t slot, int64_t row) {
    PW_UNROLL for (int p = 0; p < np; ++p) in->at[p] = sparse_slot_of(&in->panels[p], kind, slot, row);
}

PW_INLINE void begin_reading(const tile_call *t, sparse_reader *in, int kind, int np) {
    PW_UNROLL for (int p = 0; p < np; ++p) {
        in->panels[p] = sparse_panel_of(t->sparse, t->first_panel + p, np, t->prefetch_bytes);
        in->at[p] = (sparse_slot){0}; /* of no slot yet: an empty part of k has none */
    }
    in->zero = vi_set1(kind == PW_BF16 ? 0 : (int32_t)((unsigned)t->sparse->zero_point * 0x01010101u));
}

/* Vector row `row` of the slot, of each panel: one after the other, from where the slot was begun. */
PW_INLINE void read_vector_rows(sparse_reader *in, int kind, int np, int64_t row, vi *w) {
    PW_UNROLL for (int p = 0; p < np; ++p) {
        sparse_slot *at = &in->at[p];
        uint64_t mask = row_mask(kind, at->masks, row);
        __builtin_prefetch(at->values + at->ahead);
        w[p] = kind == PW_BF16 ? expand_words(in->zero, (uint32_t)mask, at->values) : expand_bytes(in->zero, mask, at->values);
        at->values += kept_bytes(kind, mask);
    }
}

#endif
#endif
