/* Products of pairs of int16 in int32, for attention over stored keys and values (attention/pairs.c): as fast as multiply-adds
 * of float32, which multiply half as many numbers, or faster where one instruction multiplies, adds the pair and the sum
 * (VNNI). Here and not in the vocabularies, which are part of every family's name (0007).
 *
 * part_pairs puts the vectors of some panels into the order that panel_dots wants; panel_dots adds, to the sum of each
 * column, its pair times `pair`, two int16. */
#ifndef PHASEWISE_FAMILIES_ATTENTION_PAIRS_H
#define PHASEWISE_FAMILIES_ATTENTION_PAIRS_H

#include "ops.h"

#if defined(__AVX2__)

PW_INLINE __m256i load_words(const int16_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }

/* Pairs (low[i], high[i]), i < 16. */
PW_INLINE void pair_16(const int16_t *low, const int16_t *high, int32_t *out) {
    __m256i x = load_words(low), y = load_words(high);
    __m256i even = _mm256_unpacklo_epi16(x, y), odd = _mm256_unpackhi_epi16(x, y);
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i *)(void *)(out + 8), _mm256_permute2x128_si256(even, odd, 0x31));
}

#ifdef __AVX512F__

/* acc + the products of the two int16 in each lane. */
#ifdef __AVX512VNNI__
PW_INLINE vi attend_dot(vi acc, vi x, vi y) { /* assembly: see simd/avx512.h */
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(y));
    return acc;
}
#else
PW_INLINE vi attend_dot(vi acc, vi x, vi y) { return pair_dot(acc, x, y); }
#endif
/* The lower halves of each lane: of `low`, and above them of `high`. */
PW_INLINE vi paired(vi low, vi high) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, low, _mm512_slli_epi32(high, 16));
}
PW_INLINE void store_words(int16_t *p, vi v) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(v));
}
PW_INLINE void store_two_words(int16_t *p, vi first, vi second) { /* saturated: half the shuffles */
    vi packed = _mm512_packs_epi32(first, second);
    vi_store(p, _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), packed));
}
PW_INLINE vi words_of_bytes(const int8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
/* Pairs (low[i], high[i]), i < n, a multiple of 16. */
PW_INLINE void pair_rows(const int16_t *low, const int16_t *high, int64_t n, int32_t *out) {
    const vi first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        vi x = vi_load(low + i), y = vi_load(high + i);
        vi even = _mm512_unpacklo_epi16(x, y), odd = _mm512_unpackhi_epi16(x, y);
        vi_store(out + i, _mm512_permutex2var_epi64(even, first, odd));
        vi_store(out + i + 16, _mm512_permutex2var_epi64(even, second, odd));
    }
    if (i < n) pair_16(low + i, high + i, out + i);
}

#else

#ifdef __AVXVNNI__
PW_INLINE vi attend_dot(vi acc, vi x, vi y) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(x), "x"(y));
    return acc;
}
#else
PW_INLINE vi attend_dot(vi acc, vi x, vi y) { return pair_dot(acc, x, y); }
#endif
PW_INLINE vi paired(vi low, vi high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xAA); }
PW_INLINE void store_words(int16_t *p, vi v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storeu_si128((__m128i *)(void *)p, words);
}
PW_INLINE void store_two_words(int16_t *p, vi first, vi second) {
    vi_store(p, _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xD8));
}
PW_INLINE vi words_of_bytes(const int8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
PW_INLINE void pair_rows(const int16_t *low, const int16_t *high, int64_t n, int32_t *out) {
    for (int64_t i = 0; i < n; i += 16) pair_16(low + i, high + i, out + i);
}

#endif

PW_INLINE void part_pairs(vi *x, int vectors) { (void)x, (void)vectors; }
PW_INLINE void panel_dots(vi *sum, const vi *x, int32_t pair, int vectors) {
    vi pairs = vi_set1(pair);
    PW_UNROLL for (int v = 0; v < vectors; ++v) sum[v] = attend_dot(sum[v], x[v], pairs);
}

#elif defined(PW_NEON)

PW_INLINE vi paired(vi low, vi high) { return vsliq_n_s32(low, high, 16); }
PW_INLINE void store_words(int16_t *p, vi v) { vst1_s16(p, vmovn_s32(v)); }
PW_INLINE void store_two_words(int16_t *p, vi first, vi second) {
    vst1q_s16(p, vcombine_s16(vmovn_s32(first), vmovn_s32(second)));
}
PW_INLINE vi words_of_bytes(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}
PW_INLINE void pair_rows(const int16_t *low, const int16_t *high, int64_t n, int32_t *out) {
    for (int64_t i = 0; i < n; i += 8) {
        int16x8x2_t zipped = vzipq_s16(vld1q_s16(low + i), vld1q_s16(high + i));
        vst1q_s32(out + i, vreinterpretq_s32_s16(zipped.val[0]));
        vst1q_s32(out + i + 4, vreinterpretq_s32_s16(zipped.val[1]));
    }
}
/* Two vectors of pairs become one of their first and one of their second numbers: each then meets one number of `pair`
 * in multiply-adds that widen. */
PW_INLINE void part_pairs(vi *x, int vectors) {
    PW_UNROLL for (int v = 0; v < vectors; v += 2) {
        int16x8_t one = vreinterpretq_s16_s32(x[v]), other = vreinterpretq_s16_s32(x[v + 1]);
        x[v] = vreinterpretq_s32_s16(vuzp1q_s16(one, other));
        x[v + 1] = vreinterpretq_s32_s16(vuzp2q_s16(one, other));
    }
}
PW_INLINE void panel_dots(vi *sum, const vi *x, int32_t pair, int vectors) {
    int16x4_t factors = vreinterpret_s16_s32(vdup_n_s32(pair));
    PW_UNROLL for (int v = 0; v < vectors; v += 2) {
        int16x8_t first = vreinterpretq_s16_s32(x[v]), second = vreinterpretq_s16_s32(x[v + 1]);
        sum[v] = vmlal_lane_s16(sum[v], vget_low_s16(first), factors, 0);
        sum[v + 1] = vmlal_high_lane_s16(sum[v + 1], first, factors, 0);
        sum[v] = vmlal_lane_s16(sum[v], vget_low_s16(second), factors, 1);
        sum[v + 1] = vmlal_high_lane_s16(sum[v + 1], second, factors, 1);
    }
}

#else

PW_INLINE vi paired(vi low, vi high) { return (low & vi_set1(0xFFFF)) | vi_shl(high, 16); }
PW_INLINE void store_words(int16_t *p, vi v) { for (int i = 0; i < LANES; ++i) p[i] = (int16_t)v[i]; }
PW_INLINE void store_two_words(int16_t *p, vi first, vi second) {
    store_words(p, first);
    store_words(p + LANES, second);
}
PW_INLINE vi words_of_bytes(const int8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
PW_INLINE void pair_rows(const int16_t *low, const int16_t *high, int64_t n, int32_t *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = (int32_t)((uint16_t)low[i] | (uint32_t)(uint16_t)high[i] << 16);
}
PW_INLINE void part_pairs(vi *x, int vectors) { (void)x, (void)vectors; }
PW_INLINE void panel_dots(vi *sum, const vi *x, int32_t pair, int vectors) {
    vi pairs = vi_set1(pair);
    PW_UNROLL for (int v = 0; v < vectors; ++v) sum[v] = pair_dot(sum[v], x[v], pairs);
}

#endif
#endif
