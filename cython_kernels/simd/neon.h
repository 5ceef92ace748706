/* The vocabulary in 64-bit NEON: four lanes, thirty-two registers; with the dots that the compiler is told of
 * (DOTPROD: bytes of one sign; I8MM: unsigned times signed; BF16: pairs of bf16).
 *
 * Compiled with -fno-schedule-insns: before it assigns registers, gcc 12 moves loads far ahead of their use, and then
 * has to spill the sums of a tile. */
#if !defined(__aarch64__) || !defined(__ARM_NEON)
#error "this is for 64-bit Arm"
#endif
#include <arm_neon.h>

#include "simd/common.h"

#define PW_NEON 1
#define LANES 4
typedef float32x4_t vf;
typedef int32x4_t vi;

PW_INLINE vf v_set1(float x) { return vdupq_n_f32(x); }
PW_INLINE vf v_zero(void) { return vdupq_n_f32(0.0f); }
PW_INLINE vf v_load(const float *p) { return vld1q_f32(p); }
PW_INLINE void v_store(float *p, vf v) { vst1q_f32(p, v); }
PW_INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
PW_INLINE vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
PW_INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
PW_INLINE vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
#define PW_FMA_ROUNDS_ONCE 1
PW_INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
PW_INLINE vf v_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } /* b where either is NaN */
PW_INLINE vf v_min(vf a, vf b) { return vbslq_f32(vcgtq_f32(b, a), a, b); }
PW_INLINE float v_sum(vf v) { /* halves, as everywhere (families/sixteen.h): vaddvq adds neighbours */
    return vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)));
}
PW_INLINE float v_max_all(vf v) { return vmaxvq_f32(v); }
PW_INLINE vf v_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
PW_INLINE void v_store_f16(uint16_t *p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

/* The first n of LANES values; the rest reads as zero and is not written. No byte beyond them is touched. */
PW_INLINE vf v_load_n(const float *p, int n) {
    if (n == LANES) return v_load(p);
    float32x2_t low = vdup_n_f32(0.0f), high = low;
    if (n & 2) low = vld1_f32(p);
    if (n == 3) high = vld1_lane_f32(p + 2, high, 0);
    if (n == 1) low = vld1_lane_f32(p, low, 0);
    return vcombine_f32(low, high);
}
PW_INLINE void v_store_n(float *p, vf v, int n) {
    if (n == LANES) v_store(p, v);
    if (n == 2 || n == 3) vst1_f32(p, vget_low_f32(v));
    if (n == 3) vst1q_lane_f32(p + 2, v, 2);
    if (n == 1) vst1q_lane_f32(p, v, 0);
}

PW_INLINE vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
PW_INLINE vi vi_load(const void *p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)p)); }
PW_INLINE void vi_store(void *p, vi v) { vst1q_u8((uint8_t *)p, vreinterpretq_u8_s32(v)); }
PW_INLINE vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
PW_INLINE vi vi_sub(vi a, vi b) { return vsubq_s32(a, b); }
PW_INLINE vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
PW_INLINE vi vi_or(vi a, vi b) { return vorrq_s32(a, b); }
PW_INLINE vi vi_max(vi a, vi b) { return vmaxq_s32(a, b); }
#define vi_shl(v, bits) vshlq_n_s32(v, bits)
#define vi_shr(v, bits) vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), bits)) /* logical */
PW_INLINE vf vi_to_vf(vi v) { return vcvtq_f32_s32(v); }
PW_INLINE vi v_bits(vf v) { return vreinterpretq_s32_f32(v); }
PW_INLINE vf vi_as_vf(vi v) { return vreinterpretq_f32_s32(v); }
PW_INLINE vi v_round(vf v) { return vcvtnq_s32_f32(v); }
PW_INLINE int32_t vi_sum(vi v) { return vaddvq_s32(v); }
PW_INLINE int32_t vi_max_all(vi v) { return vmaxvq_s32(v); }
PW_INLINE void vi_store_i8(int8_t *p, vi v) {
    int16x4_t words = vmovn_s32(v);
    int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    memcpy(p, &bytes, 4);
}

/* LANES bytes, unsigned. A table of 16 bytes, and of each byte of v, below 16, what it holds there. */
PW_INLINE vi vi_load_u8(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
PW_INLINE vi vi_table(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
PW_INLINE vi vi_look_up(vi table, vi v) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(v)));
}

PW_INLINE vi quad_set1(const uint8_t *quads, int64_t quad) {
    int32_t four;
    memcpy(&four, quads + 4 * quad, sizeof four);
    return vi_set1(four);
}

/* Dot words (gemm_quant.c). But for I8MM, bytes meet bytes of their own sign only: q8 weights are read as v - 128, and
 * the bias of a row of activations makes up for it. */
enum { Q8_ACTIVATION_BYTES = 1 };
typedef vi va8;
PW_INLINE va8 va8_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
PW_INLINE vi q8_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE int8x16_t as_bytes(vi v) { return vreinterpretq_s8_s32(v); }
PW_INLINE int8x16_t less_128(vi w) { return veorq_s8(as_bytes(w), vdupq_n_s8(-128)); }

/* Products of bytes, w[16] a[16], each at most 2^14, neighbours added: sixteen bits hold two such sums. */
PW_INLINE int16x8_t pair_products(int8x16_t w, int8x16_t a) {
    return vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a)), vmull_high_s8(w, a));
}

#ifdef __ARM_FEATURE_MATMUL_INT8
enum { Q8_WEIGHT_OFFSET = 0 };
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) { return vusdotq_s32(acc, vreinterpretq_u8_s32(w), as_bytes(a)); }
#elif defined(__ARM_FEATURE_DOTPROD)
enum { Q8_WEIGHT_OFFSET = 128 };
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) { return vdotq_s32(acc, less_128(w), as_bytes(a)); }
#else
enum { Q8_WEIGHT_OFFSET = 128 };
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) { return vpadalq_s16(acc, pair_products(less_128(w), as_bytes(a))); }
#endif

typedef vi va4;
PW_INLINE va4 va4_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
#ifdef __ARM_FEATURE_DOTPROD
PW_INLINE vi q4_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q4_dot(vi acc, vi w, va4 a) { return vdotq_s32(acc, as_bytes(w), as_bytes(a)); }
PW_INLINE vi q4_end(vi acc, int32_t bias) { (void)bias; return acc; }
#else
/* As in avx2.h: 8 quads of |w a| <= 15 * 127, two products to a lane, stay below 2^15. */
PW_INLINE vi q4_begin(int32_t bias) { (void)bias; return vi_set1(0); }
PW_INLINE vi q4_dot(vi acc, vi w, va4 a) {
    int16x8_t sums = vaddq_s16(vreinterpretq_s16_s32(acc), pair_products(as_bytes(w), as_bytes(a)));
    return vreinterpretq_s32_s16(sums);
}
PW_INLINE vi q4_end(vi acc, int32_t bias) { return vpadalq_s16(vi_set1(bias), vreinterpretq_s16_s32(acc)); }
#endif

/* Dots of blocks (gemm_blockwise.c), as in avx2.h. */
enum { WIDE_DOT_OFFSET = 128 };
PW_INLINE vi pair_dot(vi acc, vi w, vi a) {
    int16x8_t u = vreinterpretq_s16_s32(w), v = vreinterpretq_s16_s32(a);
    return vaddq_s32(acc, vpaddq_s32(vmull_s16(vget_low_s16(u), vget_low_s16(v)), vmull_high_s16(u, v)));
}
#ifdef __ARM_FEATURE_DOTPROD
#define PW_DOT_HALVES 0
PW_INLINE vi wide_dot(vi acc, vi w, va4 a) { return vdotq_s32(acc, less_128(w), as_bytes(a)); }
PW_INLINE vi add_scaled(vi acc, vi dots, vi words) { return vmlaq_s32(acc, dots, words); }
#else
#define PW_DOT_HALVES 1
PW_INLINE vi wide_dot(vi acc, vi w, va4 a) {
    int16x8_t sums = vaddq_s16(vreinterpretq_s16_s32(acc), pair_products(less_128(w), as_bytes(a)));
    return vreinterpretq_s32_s16(sums);
}
PW_INLINE vi add_scaled(vi acc, vi dots, vi words) { return pair_dot(acc, dots, words); }
#endif

/* The bf16 dot (gemm_dense.h): pairs of weights times pairs of activations. */
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define PW_BF16_DOT_WORDS 1
PW_INLINE vf bf16_dot(vf acc, vi w, vi a) {
    return vbfdotq_f32(acc, vreinterpretq_bf16_s32(w), vreinterpretq_bf16_s32(a));
}
#endif

/* Where cores do not expand (gemm_expand.h): bytes of `values` by their places, 0 or `zero` where a place is 128. */
#define PW_SHUFFLE_WORDS 1
PW_INLINE void shuffle_16(const uint8_t *values, const uint8_t *places, uint8_t *out) {
    vst1q_u8(out, vqtbl1q_u8(vld1q_u8(values), vld1q_u8(places)));
}
PW_INLINE void shuffle_8(const uint8_t *values, const uint8_t *places, int zero, uint8_t *out) {
    uint8x8_t at = vld1_u8(places);
    vst1_u8(out, vbsl_u8(vcge_u8(at, vdup_n_u8(128)), vdup_n_u8((uint8_t)zero), vtbl1_u8(vld1_u8(values), at)));
}

/* Micro-kernels (rows x panels of four vectors) that fit thirty-two registers; a quant tile holds integer sums, and
 * float sums beside them up to QUANT_TILE_HELD. */
#define DENSE_TILES(X, of...) PW_ROWS_6(X, 1, of) PW_ROWS_2(X, 2, of) PW_ROWS_1(X, 3, of)
#define QUANT_TILES(X, of...) PW_ROWS_6(X, 1, of) PW_ROWS_2(X, 2, of) PW_ROWS_1(X, 3, of)
#define COLUMN_TILES(X, of...) QUANT_TILES(X, of) /* of one int32 sum each */
enum { COLUMN_MR = 6, COLUMN_PANELS = 1 };
enum { QUANT_TILE_HELD = 12 }; /* vectors of float sums that fit beside as many integer sums */
/* The fastest of them over many rows; panels to read at once where one or two rows stream. */
enum { DENSE_MR = 6, DENSE_PANELS = 1, QUANT_MR = 6, QUANT_PANELS = 1, STREAM_PANELS = 2 };
enum { DENSE_TALL_MR = 0, DENSE_TALL_PANELS = 0, F16_TALLEST_MR = 0 }; /* for a few rows more than DENSE_MR; 0: none */
enum { QUANT_TALL_MR = 0, QUANT_TALL_PANELS = 0, QUANT_TALLEST_MR = 0 }; /* for a few rows more than QUANT_MR; 0: none */
