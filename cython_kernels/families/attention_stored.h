/* The formats of stored keys and values (pw_kv_format), in the words of each vocabulary: LANES of them as float32. */
#ifndef PHASEWISE_FAMILIES_ATTENTION_STORED_H
#define PHASEWISE_FAMILIES_ATTENTION_STORED_H

#if defined(__AVX512F__)
PW_INLINE vf v_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
PW_INLINE vf v_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
#elif defined(__AVX2__)
PW_INLINE vf v_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PW_INLINE vf v_load_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}
#elif defined(PW_NEON)
PW_INLINE vf v_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
PW_INLINE vf v_load_i8(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    int16x8_t words = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}
#else
PW_INLINE vf v_load_bf16(const uint16_t *p) {
    return (vf){pw_from_bf16(p[0]), pw_from_bf16(p[1]), pw_from_bf16(p[2]), pw_from_bf16(p[3])};
}
PW_INLINE vf v_load_i8(const int8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
#endif

/* Of int8 without its scale. */
PW_INLINE vf v_load_stored(const void *p, const int format) {
    switch (format) {
    case PW_KV_F32: return v_load(p);
    case PW_KV_F16: return v_load_f16(p);
    case PW_KV_BF16: return v_load_bf16(p);
    default: return v_load_i8(p);
    }
}

#endif
