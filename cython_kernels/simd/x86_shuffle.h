/* Where cores do not expand (gemm_expand.h): bytes of `values` by their places, 0 or `zero` where a place is 128. */
#define PW_SHUFFLE_WORDS 1
PW_INLINE void shuffle_16(const void *values, const uint8_t *places, uint8_t *out) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)values), at = _mm_loadu_si128((const __m128i *)places);
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(bytes, at));
}
PW_INLINE void shuffle_8(const void *values, const uint8_t *places, int zero, uint8_t *out) {
    __m128i bytes = _mm_loadl_epi64((const __m128i *)values), at = _mm_loadl_epi64((const __m128i *)places);
    _mm_storel_epi64((__m128i *)out, _mm_blendv_epi8(_mm_shuffle_epi8(bytes, at), _mm_set1_epi8((char)zero), at));
}
