/* families/gemm_f16.c: micro-kernels of y = x W^T for bf16 weights by float16 multiply-adds; compiled once per ISA.
 *
 * A row of x and the weight are scaled by powers of two, so that x' is at most 2^2 and w' below 2^7, and rounded to
 * float16. A lane of a vector row holds inputs k and k + 1 of a column, and so does a lane of sums: two chains. A chain
 * is 16 multiply-adds; two of them after each other, each begun at zero, are added, then the two halves of a lane: a
 * fold of 64 inputs, at most 2^15 (1 + small) whatever the numbers are, which float16 holds (65504). Folds are added in
 * float32, in the order of k. They begin at the beginning of a part of k, every 64 inputs, and passes end with one, so
 * that tiles, stages and passes change no bit.
 *
 * A product is followed by its own rounding and at most 15 + 1 + 1 more before its sum is a float32 (exact: every
 * float16 times 2^-112 is a float32), and by ceil(k / 64) and P - 1 additions there. With the rounding of x, u = 2^-11:
 *     |y - exact| <= (gamma'_19 + gamma_(k/64 + 2 P)) sum |x_i w_i| + dust,   gamma'_n = n u / (1 - n u),
 * against the exact y of the x that is given, not of a rounded one. Dust is what float16 is too coarse for, X and W
 * being the largest magnitudes of the row (at least 2^-125) and of the weight (at least 2^-106):
 *     2^-21 W sum |x_i|   weights below 2^-20 W: their last bits, or all, are cut off, at most 2^-15 of a w' >= 2^6;
 *     2^-26 X sum |w_i|   inputs that are subnormal, rounded by at most 2^-25 of an x' >= 2;
 *     2^-32 k X W         products that are, by as much of a sum beside 2^7.
 * For random signs a chain of n multiply-adds has a variance of n / 2 roundings of its result: about 9 u'^2 a fold, and
 * u'^2 for x, where rounding x to bf16, as the other paths of bf16 do, has (8 u')^2: a root mean square 2.5 times as
 * large. Of sums whose terms all have one sign both lose about the same.
 *
 * A row with a NaN gives NaN. In one with infinities these count as one of their sign and the rest as nothing; the sum
 * is multiplied by infinity. */
#include "families/gemm_tiles.h"

#ifdef PW_F16_WORDS

enum { CHAIN_STEPS = F16_FOLD_STEPS / 2, STEPS_A_TURN = 4 };

/* Where a tile reads. */
typedef struct {
    const uint8_t *values, *x;
    lookahead next;
} f16_place;

PW_INLINE void f16_step(const tile_call *t, const f16_place *at, int step, vi less, int from_bf16, vi *chain, int mr,
                        int np) {
    vi w[MAX_TILE_PANELS * VECTORS];
    PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
        const uint8_t *row = at->values + c / VECTORS * t->panel_bytes + step * VECTOR_ROW_BYTES;
        w[c] = vi_load(row + c % VECTORS * LANES * 4);
        if (from_bf16) w[c] = f16_from_bf16(w[c], less);
    }
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        vi pair = vi_set1(int_at(at->x + r * t->row_bytes + 4 * step));
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
            int i = r * np * VECTORS + c;
            chain[i] = f16_fma(chain[i], w[c], pair);
        }
    }
}

/* Asks for as many lines of weights as these steps read. */
PW_INLINE void f16_ask_all(const tile_call *t, f16_place *at, int np) {
    PW_UNROLL for (int i = 0; i < STEPS_A_TURN * np; ++i) {
        ask_for(at->next.values + i % np * t->panel_bytes + i / np * VECTOR_ROW_BYTES, at->next.far);
    }
    at->next.values += STEPS_A_TURN * VECTOR_ROW_BYTES;
}

/* Asks for a share of what other tiles read. */
PW_INLINE void f16_ask_some(const tile_call *t, f16_place *at, int mr, int np) {
    PW_UNROLL for (int p = 0; p < np; ++p) ask_for(at->next.values + p * at->next.panel_bytes, at->next.far);
    at->next.values += STEPS_A_TURN * at->next.values_step;
    if (mr < TALL_MR) return;
    __builtin_prefetch(at->x + at->next.rows_ahead);
    __builtin_prefetch(at->x + at->next.rows_ahead + t->row_bytes);
}

PW_INLINE void f16_chain(const tile_call *t, f16_place *at, int from_bf16, vi *chain, int mr, int np) {
    vi less = vi_set1(f16_fields_less(t->top_exponent) * 0x00800080);
    PW_UNROLL for (int i = 0; i < mr * np * VECTORS; ++i) chain[i] = vi_set1(0);
    for (int turn = 0; turn < CHAIN_STEPS / STEPS_A_TURN; ++turn) {
        if (from_bf16) f16_ask_all(t, at, np);
        else f16_ask_some(t, at, mr, np);
        PW_UNROLL for (int i = 0; i < STEPS_A_TURN; ++i) f16_step(t, at, i, less, from_bf16, chain, mr, np);
        at->values += STEPS_A_TURN * VECTOR_ROW_BYTES;
        at->x += STEPS_A_TURN * 4;
    }
}

/* sums += both halves of each lane of the chains. */
PW_INLINE void f16_fold(const vi *chain, float *sums, int count) {
    PW_UNROLL for (int i = 0; i < count; ++i) {
        vf upper = f16_upper(f16_add(f16_swapped(chain[i]), chain[i]));
        v_store(sums + i * LANES, v_fma(upper, v_set1(0x1p112f), v_load(sums + i * LANES)));
    }
}

static __attribute__((noinline)) void f16_begin(const tile_call *t, int columns, float *sums) {
    size_t bytes = sizeof(float) * (size_t)columns;
    for (int r = 0; r < t->mr; ++r, sums += columns) {
        if (t->partial) memcpy(sums, t->partial + r * t->partial_stride, bytes);
        else memset(sums, 0, bytes);
    }
}

PW_INLINE float power_of_two(int32_t exponent) { return pw_bits_to_float((uint32_t)(exponent + 127) << 23); }

/* At the end of a part sums of scaled inputs become sums of the inputs, in two steps, so that neither overflows before
 * the result does. */
static __attribute__((noinline)) void f16_end(const tile_call *t, int columns, const float *sums) {
    for (int r = 0; r < t->mr; ++r, sums += columns) {
        const uint8_t *fields = t->row_scales + r * t->row_bytes;
        float *out = t->out + r * t->out_stride;
        int32_t exponent = int_at(fields) + f16_fields_less(t->top_exponent) - 112, half = exponent / 2;
        vf first = v_set1(power_of_two(half)), second = v_set1(power_of_two(exponent - half) * float_at(fields + 4));
        for (int c = 0; c < columns; c += LANES) {
            vf sum = v_load(sums + c);
            if (t->ends_part) sum = v_mul(v_mul(sum, first), second);
            v_store(out + c, t->add ? v_add(v_load(out + c), sum) : sum);
        }
    }
}

/* Float32 sums, and the first chain of a fold, wait in L1: the registers are for chains. */
PW_INLINE void f16_tile(const tile_call *t, int from_bf16, int mr, int np) {
    float sums[MAX_MR * MAX_TILE_PANELS * PW_PANEL] __attribute__((aligned(64)));
    float first[MAX_MR * MAX_TILE_PANELS * PW_PANEL] __attribute__((aligned(64)));
    vi chain[MAX_MR * MAX_TILE_PANELS * VECTORS];
    int count = mr * np * VECTORS;
    f16_place at = {t->values, t->rows, t->next};
    const uint8_t *end = t->values + t->steps * VECTOR_ROW_BYTES, *turn = last_read(t, end);
    f16_begin(t, np * PW_PANEL, sums);
    for (int is_second = 0; at.values < end; is_second = !is_second) {
        if (at.values >= turn) at.next.values += t->prefetch_jump, turn = end;
        f16_chain(t, &at, from_bf16, chain, mr, np);
        if (!is_second && at.values < end) {
            PW_UNROLL for (int i = 0; i < count; ++i) vi_store(first + i * LANES, chain[i]);
            __asm__ volatile("" : "+m"(sums), "+m"(first)); /* neither is to be held elsewhere */
            continue;
        }
        if (is_second) {
            PW_UNROLL for (int i = 0; i < count; ++i) chain[i] = f16_add(chain[i], vi_load(first + i * LANES));
        }
        f16_fold(chain, sums, count);
        __asm__ volatile("" : "+m"(sums), "+m"(first));
    }
    f16_end(t, np * PW_PANEL, sums);
}

PW_TILES(f16, F16_TILES, f16_tile, 0)
PW_TILES(bf16_as_f16, F16_TILES, f16_tile, 1)

#endif
