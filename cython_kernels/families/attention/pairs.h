/* Products of pairs of int16 in int32, for attention over stored keys and values (attention/pairs.c): where a core adds
 * two products of 16 bits to a sum in one instruction, at the rate of one multiply-add of float32. Here and not in the
 * vocabularies, which are part of every family's name (0007). */
#ifndef PHASEWISE_FAMILIES_ATTENTION_PAIRS_H
#define PHASEWISE_FAMILIES_ATTENTION_PAIRS_H

#include "ops.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PW_ATTEND_PAIRS 1
enum { ATTEND_PAIRS = 1 };
#else
enum { ATTEND_PAIRS = 0 };
#endif

#ifdef PW_ATTEND_PAIRS

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
PW_INLINE vi attend_dot(vi acc, vi x, vi y) { /* assembly: see simd/avx512.h */
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(y));
    return acc;
}
/* The lower halves of each lane: of `low`, and above them of `high`. */
PW_INLINE vi paired(vi low, vi high) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, low, _mm512_slli_epi32(high, 16));
}
PW_INLINE void store_words(int16_t *p, vi v) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(v));
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

PW_INLINE vi attend_dot(vi acc, vi x, vi y) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(x), "x"(y));
    return acc;
}
PW_INLINE vi paired(vi low, vi high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xAA); }
PW_INLINE void store_words(int16_t *p, vi v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storeu_si128((__m128i *)(void *)p, words);
}
PW_INLINE vi words_of_bytes(const int8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
PW_INLINE void pair_rows(const int16_t *low, const int16_t *high, int64_t n, int32_t *out) {
    for (int64_t i = 0; i < n; i += 16) pair_16(low + i, high + i, out + i);
}

#endif
#endif
#endif
