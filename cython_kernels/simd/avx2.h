/* The vocabulary in AVX2 + FMA + F16C: eight lanes; with VNNI dots where the compiler is told of them. */
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this with -mavx2 -mfma -mf16c"
#endif
#include <immintrin.h>

#include "simd/common.h"

#define LANES 8
typedef __m256 vf;
typedef __m256i vi;

PW_INLINE vf v_set1(float x) { return _mm256_set1_ps(x); }
PW_INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
PW_INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
PW_INLINE void v_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
PW_INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
PW_INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
PW_INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
PW_INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
#define PW_FMA_ROUNDS_ONCE 1
PW_INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
PW_INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); } /* b where either is NaN */
PW_INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
PW_INLINE float v_sum(vf v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
PW_INLINE float v_max_all(vf v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
PW_INLINE vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
PW_INLINE void v_store_f16(uint16_t *p, vf v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

/* The first n of LANES values; the rest reads as zero and is not written. No byte beyond them is touched. */
PW_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PW_INLINE vf v_load_n(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
PW_INLINE void v_store_n(float *p, vf v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }

PW_INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
PW_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
PW_INLINE void vi_store(void *p, vi v) { _mm256_storeu_si256((__m256i *)p, v); }
PW_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
PW_INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
PW_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
PW_INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
PW_INLINE vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
#define vi_shl(v, bits) _mm256_slli_epi32(v, bits)
#define vi_shr(v, bits) _mm256_srli_epi32(v, bits) /* logical */
PW_INLINE vf vi_to_vf(vi v) { return _mm256_cvtepi32_ps(v); }
PW_INLINE vi v_bits(vf v) { return _mm256_castps_si256(v); }
PW_INLINE vf vi_as_vf(vi v) { return _mm256_castsi256_ps(v); }
PW_INLINE vi v_round(vf v) { return _mm256_cvtps_epi32(v); }
PW_INLINE int32_t vi_sum(vi v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
PW_INLINE int32_t vi_max_all(vi v) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
PW_INLINE void vi_store_i8(int8_t *p, vi v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}

/* LANES bytes, unsigned. A table of 16 bytes, and of each byte of v, below 16, what it holds there. */
PW_INLINE vi vi_load_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
PW_INLINE vi vi_table(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
PW_INLINE vi vi_look_up(vi table, vi v) { return _mm256_shuffle_epi8(table, v); }

/* Dot words (gemm_quant.c): quads of unsigned weights times quads of signed activations, exact in int32. */
PW_INLINE vi quad_set1(const uint8_t *quads, int quad) {
    int32_t four;
    memcpy(&four, quads + 4 * quad, sizeof four);
    return vi_set1(four);
}
#ifdef __AVXVNNI__
enum { Q8_ACTIVATION_BYTES = 1, Q8_WEIGHT_OFFSET = 0 };
typedef vi va8;
PW_INLINE va8 va8_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
PW_INLINE vi q8_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) { /* assembly: see avx512.h */
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a));
    return acc;
}
typedef vi va4;
PW_INLINE va4 va4_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
PW_INLINE vi q4_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q4_dot(vi acc, vi w, va4 a) { return q8_dot(acc, w, a); }
PW_INLINE vi q4_end(vi acc, int32_t bias) { (void)bias; return acc; }
#else
/* q8: maddubs would saturate where weights pass 127, so bytes are widened to 16 bits; activations wait as
 * (a0, a2), (a1, a3) in int16, which the widened weights meet without a shuffle. */
enum { Q8_ACTIVATION_BYTES = 2, Q8_WEIGHT_OFFSET = 0 };
typedef struct { vi even, odd; } va8;
PW_INLINE va8 va8_load(const uint8_t *quads, int quad) {
    return (va8){quad_set1(quads, 2 * quad), quad_set1(quads, 2 * quad + 1)};
}
PW_INLINE vi q8_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) {
    vi even = vi_and(w, vi_set1(0x00FF00FF)), odd = _mm256_srli_epi16(w, 8);
    acc = vi_add(acc, _mm256_madd_epi16(even, a.even));
    return vi_add(acc, _mm256_madd_epi16(odd, a.odd));
}
/* q4: 8 quads of |w a| <= 15 * 127, two products to a lane, stay below 2^15: sixteen bits hold a whole group. */
typedef vi va4;
PW_INLINE va4 va4_load(const uint8_t *quads, int quad) { return quad_set1(quads, quad); }
PW_INLINE vi q4_begin(int32_t bias) { (void)bias; return _mm256_setzero_si256(); }
PW_INLINE vi q4_dot(vi acc, vi w, va4 a) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, a)); }
PW_INLINE vi q4_end(vi acc, int32_t bias) {
    return vi_add(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)), vi_set1(bias));
}
#endif

/* Dots of blocks (gemm_blockwise.c): of codes above 128 less WIDE_DOT_OFFSET; dots times the words of sub-scales; int16 pairs.
 * Where PW_DOT_HALVES, a lane's dots are two sums of sixteen bits. */
PW_INLINE vi pair_dot(vi acc, vi w, vi a) { return vi_add(acc, _mm256_madd_epi16(w, a)); }
#ifdef __AVXVNNI__
#define PW_DOT_HALVES 0
enum { WIDE_DOT_OFFSET = 0 };
PW_INLINE vi wide_dot(vi acc, vi w, va4 a) { return q8_dot(acc, w, a); }
PW_INLINE vi add_scaled(vi acc, vi dots, vi words) { return vi_add(acc, _mm256_mullo_epi32(dots, words)); }
#else
#define PW_DOT_HALVES 1
enum { WIDE_DOT_OFFSET = 128 };
PW_INLINE vi wide_dot(vi acc, vi w, va4 a) { /* |w| <= 127 once 128 is off: one quad fits */
    vi signs = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(signs), _mm256_sign_epi8(a, signs)));
}
PW_INLINE vi add_scaled(vi acc, vi dots, vi words) { return pair_dot(acc, dots, words); }
#endif

#include "simd/x86_shuffle.h"

/* Micro-kernels (rows x panels) that fit sixteen registers; quant tiles keep float sums in memory between groups. More
 * than three rows of two panels do not fit: gemm_dense.h. */
#define DENSE_TILES(X, of...) PW_ROWS_6(X, 1, of) PW_ROWS_6(X, 2, of) PW_ROWS_1(X, 3, of) PW_ROWS_1(X, 4, of)
#ifdef __AVXVNNI__
#define QUANT_TILES(X, of...) PW_ROWS_6(X, 1, of) PW_ROWS_3(X, 2, of) PW_ROWS_2(X, 3, of) X(1, 4, of)
#define COLUMN_TILES(X, of...) QUANT_TILES(X, of) /* of one int32 sum each */
enum { QUANT_MR = 6, COLUMN_MR = 6 };
#else
#define QUANT_TILES(X, of...) PW_ROWS_4(X, 1, of) PW_ROWS_2(X, 2, of) X(1, 4, of)
#define COLUMN_TILES(X, of...) QUANT_TILES(X, of)
enum { QUANT_MR = 4, COLUMN_MR = 4 };
#endif
enum { QUANT_TILE_HELD = 4 }; /* vectors of float sums that fit beside as many integer sums */
/* The fastest of them over many rows; panels to read at once where one or two rows stream. */
enum { DENSE_MR = 6, DENSE_PANELS = 1, QUANT_PANELS = 1, COLUMN_PANELS = 1, STREAM_PANELS = 4 };
enum { DENSE_TALL_MR = 0, DENSE_TALL_PANELS = 0, F16_TALLEST_MR = 0 }; /* for a few rows more than DENSE_MR; 0: none */
enum { QUANT_TALL_MR = 0, QUANT_TALL_PANELS = 0, QUANT_TALLEST_MR = 0 }; /* for a few rows more than QUANT_MR; 0: none */
