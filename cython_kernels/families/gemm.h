/* What the parts of the GEMM family share: the row block of quantised activations, and a micro-kernel's call. */
#ifndef PHASEWISE_FAMILIES_GEMM_H
#define PHASEWISE_FAMILIES_GEMM_H

#include "dispatch.h"

/* A vector row is the 64 bytes of a panel that hold 16 columns of 1 (f32), 2 (bf16), 4 (q8) or 8 (q4) inputs. */
enum { MAX_MR = 16, MAX_TILE_PANELS = 4, VECTORS = PW_PANEL / LANES, VECTOR_ROW_BYTES = 64 };

PW_INLINE int inputs_per_vector_row(int kind) { return 1 << kind; }

/* A group of quantised activations: the values in the order of the ISA's dots, then
 * float scale; int32 -zero_point * sum(q); float scale * sum(q). */
PW_INLINE int64_t group_values_bytes(int kind, int group) {
    return kind == PW_Q8 ? group * Q8_ACTIVATION_BYTES : group;
}
PW_INLINE int64_t group_block_bytes(int kind, int group) { return group_values_bytes(kind, group) + 12; }

/* One micro-kernel call: mr rows times `panels` panels over steps [begin, end) of k. A step is one input (f32), a
 * pair (bf16) or a group (q8, q4). out = partial sum so far + this range, plus out's old value if `add`. */
typedef struct {
    const uint8_t *rows; /* first row, k = 0 */
    int64_t row_bytes;
    const uint8_t *values; /* first panel, k = 0 */
    int64_t panel_bytes;
    const uint8_t *scales, *mins; /* first panel, group 0 */
    int64_t panel_scale_bytes;
    int32_t scale_bytes;
    int32_t add;
    int64_t begin, end;
    int64_t prefetch_bytes;
    const float *partial; /* [mr][partial_stride], NULL: nothing yet */
    int64_t partial_stride;
    float *out; /* [mr][out_stride] */
    int64_t out_stride;
} tile_call;

typedef void tile_kernel(const tile_call *t);

PW_INLINE float float_at(const uint8_t *p) {
    float x;
    memcpy(&x, p, sizeof x);
    return x;
}

PW_INLINE int32_t int_at(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The sums of a tile: [row][vector of LANES columns]. Indices are constants after unrolling, so these are registers. */
typedef vf sums[MAX_MR][MAX_TILE_PANELS * VECTORS];

PW_INLINE void begin_sums(const tile_call *t, sums acc, int mr, int vectors) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            acc[r][c] = t->partial ? v_load(t->partial + r * t->partial_stride + c * LANES) : v_zero();
        }
    }
}

PW_INLINE void end_sums(const tile_call *t, sums acc, int mr, int vectors) {
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        float *out = t->out + r * t->out_stride;
        PW_UNROLL for (int c = 0; c < vectors; ++c) {
            vf sum = t->add ? v_add(v_load(out + c * LANES), acc[r][c]) : acc[r][c];
            v_store(out + c * LANES, sum);
        }
    }
}

#endif
