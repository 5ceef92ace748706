/* The formats of stored keys and values (pw_kv_format), in the words of each vocabulary: LANES of them as float32.
 * Of int4: v_codes_of_words has code number `code` of each of LANES words, v_codes LANES codes of consecutive words from
 * number `first` on; v_low_bf16 and v_high_bf16 have the halves of LANES words. */
#ifndef PHASEWISE_FAMILIES_ATTENTION_STORED_H
#define PHASEWISE_FAMILIES_ATTENTION_STORED_H

#include "ops.h"

#if defined(__AVX512F__)
PW_INLINE vf v_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
PW_INLINE vf v_codes_of_words(const uint32_t *p, const int code) {
    __m512i shifted = _mm512_srli_epi32(_mm512_loadu_si512(p), (unsigned)(4 * code));
    return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(15)));
}
PW_INLINE vf v_codes(const uint32_t *p, const int first) {
    const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    __m512i words = _mm512_castsi256_si512(_mm256_set1_epi32((int32_t)p[first / 8]));
    words = _mm512_inserti64x4(words, _mm256_set1_epi32((int32_t)p[first / 8 + 1]), 1);
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15)));
}
PW_INLINE vf v_low_bf16(const uint32_t *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
PW_INLINE vf v_high_bf16(const uint32_t *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int32_t)0xFFFF0000u)));
}
#elif defined(__AVX2__)
PW_INLINE vf v_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PW_INLINE __m256i v_words(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }
PW_INLINE vf v_codes_of_words(const uint32_t *p, const int code) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v_words(p), 4 * code), _mm256_set1_epi32(15)));
}
PW_INLINE vf v_codes(const uint32_t *p, const int first) {
    const __m256i shifts = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32((int32_t)p[first / 8]), shifts);
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)));
}
PW_INLINE vf v_low_bf16(const uint32_t *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(v_words(p), 16)); }
PW_INLINE vf v_high_bf16(const uint32_t *p) {
    return _mm256_castsi256_ps(_mm256_and_si256(v_words(p), _mm256_set1_epi32((int32_t)0xFFFF0000u)));
}
#elif defined(PW_NEON)
PW_INLINE vf v_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
PW_INLINE vf v_codes_shifted(uint32x4_t words, int32x4_t shifts) {
    return vcvtq_f32_u32(vandq_u32(vshlq_u32(words, shifts), vdupq_n_u32(15)));
}
PW_INLINE vf v_codes_of_words(const uint32_t *p, const int code) {
    return v_codes_shifted(vld1q_u32(p), vdupq_n_s32(-4 * code));
}
PW_INLINE vf v_codes(const uint32_t *p, const int first) {
    const int32x4_t shifts = {0, -4, -8, -12};
    return v_codes_shifted(vdupq_n_u32(p[first / 8] >> 4 * (first % 8)), shifts);
}
PW_INLINE vf v_low_bf16(const uint32_t *p) { return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(p), 16)); }
PW_INLINE vf v_high_bf16(const uint32_t *p) {
    return vreinterpretq_f32_u32(vandq_u32(vld1q_u32(p), vdupq_n_u32(0xFFFF0000u)));
}
#else
PW_INLINE vf v_load_bf16(const uint16_t *p) {
    return (vf){pw_from_bf16(p[0]), pw_from_bf16(p[1]), pw_from_bf16(p[2]), pw_from_bf16(p[3])};
}
PW_INLINE float code_of(uint32_t word, int code) { return (float)(word >> 4 * code & 15); }
PW_INLINE vf v_codes_of_words(const uint32_t *p, const int code) {
    return (vf){code_of(p[0], code), code_of(p[1], code), code_of(p[2], code), code_of(p[3], code)};
}
PW_INLINE vf v_codes(const uint32_t *p, const int first) {
    uint32_t word = p[first / 8] >> 4 * (first % 8);
    return (vf){code_of(word, 0), code_of(word, 1), code_of(word, 2), code_of(word, 3)};
}
PW_INLINE float high_bf16(uint32_t word) { return pw_from_bf16((uint16_t)(word >> 16)); }
PW_INLINE float low_bf16(uint32_t word) { return pw_from_bf16((uint16_t)word); }
PW_INLINE vf v_low_bf16(const uint32_t *p) { return (vf){low_bf16(p[0]), low_bf16(p[1]), low_bf16(p[2]), low_bf16(p[3])}; }
PW_INLINE vf v_high_bf16(const uint32_t *p) { return (vf){high_bf16(p[0]), high_bf16(p[1]), high_bf16(p[2]), high_bf16(p[3])}; }
#endif

/* Of formats that are floats. */
PW_INLINE vf v_load_stored(const void *p, const int format) {
    switch (format) {
    case PW_KV_F32: return v_load(p);
    case PW_KV_F16: return v_load_f16(p);
    default: return v_load_bf16(p);
    }
}

#endif
