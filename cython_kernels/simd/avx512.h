/* The vocabulary in AVX-512 F/BW/VL/DQ: sixteen lanes; with VNNI and BF16 dots where the compiler is told of them.
 *
 * The dots are inline assembly because gcc 12 copies and spills the accumulators of the intrinsics in a tile of 24
 * registers, at half the speed. */
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "compile this with -mavx512f -mavx512bw -mavx512vl -mavx512dq"
#endif
#include <immintrin.h>

#include "simd/common.h"

#define LANES 16
typedef __m512 vf;
typedef __m512i vi;

PW_INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
PW_INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
PW_INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
PW_INLINE void v_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
PW_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
PW_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PW_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PW_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
#define PW_FMA_ROUNDS_ONCE 1
PW_INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
#define PW_FMA_IN_PLACE 1
/* v_fma whose sum stays in its register. */
PW_INLINE vf v_fma_in_place(vf a, vf b, vf acc) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}
PW_INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b where either is NaN */
PW_INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
PW_INLINE float v_sum(vf v) { return _mm512_reduce_add_ps(v); }
PW_INLINE float v_max_all(vf v) { return _mm512_reduce_max_ps(v); }
PW_INLINE vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
PW_INLINE void v_store_f16(uint16_t *p, vf v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

/* The first n of LANES values; the rest reads as zero and is not written. No byte beyond them is touched. */
PW_INLINE vf v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p); }
PW_INLINE void v_store_n(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), v); }

PW_INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
PW_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
PW_INLINE void vi_store(void *p, vi v) { _mm512_storeu_si512(p, v); }
PW_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
PW_INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
PW_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
PW_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
PW_INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
#define vi_shl(v, bits) _mm512_slli_epi32(v, bits)
#define vi_shr(v, bits) _mm512_srli_epi32(v, bits) /* logical */
PW_INLINE vf vi_to_vf(vi v) { return _mm512_cvtepi32_ps(v); }
PW_INLINE vi v_bits(vf v) { return _mm512_castps_si512(v); }
PW_INLINE vf vi_as_vf(vi v) { return _mm512_castsi512_ps(v); }
PW_INLINE vi v_round(vf v) { return _mm512_cvtps_epi32(v); }
PW_INLINE int32_t vi_sum(vi v) { return _mm512_reduce_add_epi32(v); }
PW_INLINE int32_t vi_max_all(vi v) { return _mm512_reduce_max_epi32(v); }
PW_INLINE void vi_store_i8(int8_t *p, vi v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(v)); }

/* LANES bytes, unsigned. A table of 16 bytes, and of each byte of v, below 16, what it holds there. */
PW_INLINE vi vi_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
PW_INLINE vi vi_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
PW_INLINE vi vi_look_up(vi table, vi v) { return _mm512_shuffle_epi8(table, v); }

PW_INLINE vi quad_set1(const uint8_t *quads, int quad) {
    int32_t four;
    memcpy(&four, quads + 4 * quad, sizeof four);
    return vi_set1(four);
}

/* Dot words (gemm_quant.c): quads of unsigned weights times quads of signed activations, exact in int32. */
#ifdef __AVX512VNNI__
enum { Q8_ACTIVATION_BYTES = 1, Q8_WEIGHT_OFFSET = 0 };
typedef vi va8;
PW_INLINE va8 va8_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
PW_INLINE vi q8_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
    return acc;
}
/* The dot with the quad at x, broadcast by the instruction itself. */
#define PW_DOT_OPERANDS 1
PW_INLINE vi dot_at(vi acc, vi w, const uint8_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const char (*)[4])x));
    return acc;
}
typedef vi va4;
PW_INLINE va4 va4_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
PW_INLINE vi q4_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q4_dot(vi acc, vi w, va4 a) { return q8_dot(acc, w, a); }
PW_INLINE vi q4_end(vi acc, int32_t bias) { (void)bias; return acc; }
#else
/* As in avx2.h: bytes widened to 16 bits for q8, a whole group in sixteen bits for q4. */
enum { Q8_ACTIVATION_BYTES = 2, Q8_WEIGHT_OFFSET = 0 };
typedef struct { vi even, odd; } va8;
PW_INLINE va8 va8_load(const uint8_t *quads, int quad) {
    return (va8){quad_set1(quads, 2 * quad), quad_set1(quads, 2 * quad + 1)};
}
PW_INLINE vi q8_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) {
    vi even = vi_and(w, vi_set1(0x00FF00FF)), odd = _mm512_srli_epi16(w, 8);
    acc = vi_add(acc, _mm512_madd_epi16(even, a.even));
    return vi_add(acc, _mm512_madd_epi16(odd, a.odd));
}
typedef vi va4;
PW_INLINE va4 va4_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
PW_INLINE vi q4_begin(int32_t bias) { (void)bias; return _mm512_setzero_si512(); }
PW_INLINE vi q4_dot(vi acc, vi w, va4 a) { return _mm512_add_epi16(acc, _mm512_maddubs_epi16(w, a)); }
PW_INLINE vi q4_end(vi acc, int32_t bias) {
    return vi_add(_mm512_madd_epi16(acc, _mm512_set1_epi16(1)), vi_set1(bias));
}
#endif

/* Dots of blocks (gemm_blockwise.c), as in avx2.h. */
PW_INLINE vi pair_dot(vi acc, vi w, vi a) { return vi_add(acc, _mm512_madd_epi16(w, a)); }
#ifdef __AVX512VNNI__
#define PW_DOT_HALVES 0
enum { WIDE_DOT_OFFSET = 0 };
PW_INLINE vi wide_dot(vi acc, vi w, va4 a) { return q8_dot(acc, w, a); }
PW_INLINE vi add_scaled(vi acc, vi dots, vi words) { return vi_add(acc, _mm512_mullo_epi32(dots, words)); }
#else
#define PW_DOT_HALVES 1
enum { WIDE_DOT_OFFSET = 128 };
PW_INLINE vi wide_dot(vi acc, vi w, va4 a) {
    vi signs = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
    vi turned = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), a);
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(_mm512_abs_epi8(signs), turned));
}
PW_INLINE vi add_scaled(vi acc, vi dots, vi words) { return pair_dot(acc, dots, words); }
#endif

/* Expansion (gemm_expand.h): where `mask` has bits, the values one after another; elsewhere `zero` stays. Only for cores
 * with VBMI2 (pw_cpu_expands), which no flag of the compiler tells: assembly. `zero` is merged, because zeroing waits for
 * the register's old value on some cores. */
#define PW_EXPAND_WORDS 1
PW_INLINE vi expand_words(vi zero, uint32_t mask, const void *values) {
    __mmask32 kept;
    __asm__("kmovd %1, %0" : "=Yk"(kept) : "r"(mask)); /* half the cycles of kmovq, which gcc would take */
    __asm__("vpexpandw %1, %0%{%2%}" : "+v"(zero) : "v"(vi_load(values)), "Yk"(kept));
    return zero;
}
PW_INLINE vi expand_bytes(vi zero, uint64_t mask, const void *values) {
    __asm__("vpexpandb %1, %0%{%2%}" : "+v"(zero) : "v"(vi_load(values)), "Yk"((__mmask64)mask));
    return zero;
}

/* The bf16 dot (gemm_dense.h): pairs of weights times pairs of activations. */
#ifdef __AVX512BF16__
#define PW_BF16_DOT_WORDS 1
PW_INLINE vf bf16_dot(vf acc, vi w, vi a) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
    return acc;
}
#endif

/* Subnormals as zeros, as vdpbf16ps reads them; rounding to bf16 would make some of them normal. */
#define PW_SUBNORMAL_WORDS 1
PW_INLINE vf v_without_subnormals(vf x) {
    return _mm512_mask_and_ps(x, _mm512_fpclass_ps_mask(x, 0x20), x, _mm512_set1_ps(-0.0f));
}

/* Pairs of float16 (gemm_f16.c): a lane holds two. */
#ifdef __AVX512FP16__
#define PW_F16_WORDS 1
PW_INLINE vi f16_fma(vi acc, vi w, vi a) { /* assembly: see above */
    __asm__("vfmadd231ph %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
    return acc;
}
PW_INLINE vi f16_add(vi a, vi b) {
    __asm__("vaddph %1, %0, %0" : "+v"(a) : "v"(b));
    return a;
}
PW_INLINE vi f16_swapped(vi a) { return _mm512_rol_epi32(a, 16); }
/* The upper float16 of each lane as float32, times 2^-112: exact. */
PW_INLINE vf f16_upper(vi a) { return vi_as_vf(vi_and(_mm512_srai_epi32(a, 3), vi_set1((int32_t)0x8FFFE000))); }
/* bf16 to float16 of an exponent field that is `less` (a multiple of 128 in each half) / 128 smaller, towards zero. */
PW_INLINE vi f16_from_bf16(vi w, vi less) {
    vi magnitude = _mm512_slli_epi16(_mm512_subs_epu16(vi_and(w, vi_set1(0x7FFF7FFF)), less), 3);
    return _mm512_ternarylogic_epi32(magnitude, w, vi_set1(0x7FFF7FFF), 0xE4); /* mask ? magnitude : w */
}
#endif

#include "simd/x86_shuffle.h"

/* Micro-kernels (rows x panels) that fit thirty-two registers; quant tiles hold an integer and a float sum each. */
#define DENSE_TILES(X, of...) \
    F16_TILES(X, of) PW_ROWS_5(X, 5, of) PW_ROWS_4(X, 6, of) PW_ROWS_3(X, 7, of) PW_ROWS_2(X, 8, of)
#define F16_TILES(X, of...) PW_ROWS_30(X, 1, of) PW_ROWS_14(X, 2, of) PW_ROWS_9(X, 3, of) PW_ROWS_6(X, 4, of)
#define QUANT_TILES(X, of...) PW_ROWS_8(X, 1, of) PW_ROWS_6(X, 2, of) PW_ROWS_4(X, 3, of) PW_ROWS_3(X, 4, of)
/* Tiles of one int32 sum each. */
#define COLUMN_TILES(X, of...) PW_ROWS_8(X, 1, of) PW_ROWS_12(X, 2, of) PW_ROWS_8(X, 3, of) PW_ROWS_6(X, 4, of)
enum { COLUMN_MR = 8, COLUMN_PANELS = 3 };
enum { QUANT_TILE_HELD = 12 }; /* vectors of float sums that fit beside as many integer sums */
/* The fastest of them over many rows; panels to read at once where one or two rows stream. */
enum { DENSE_MR = 9, DENSE_PANELS = 3, QUANT_MR = 4, QUANT_PANELS = 3, STREAM_PANELS = 4 };
enum { DENSE_TALL_MR = 14, DENSE_TALL_PANELS = 2, F16_TALLEST_MR = 30 }; /* for a few rows more than DENSE_MR; 0: none */
enum { QUANT_TALL_MR = 6, QUANT_TALL_PANELS = 2, QUANT_TALLEST_MR = 8 }; /* for a few rows more than QUANT_MR; 0: none */
