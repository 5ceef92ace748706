/* Numbers rounded to bytes by one scale (quantise.c: rows of products; attention/cache.c: keys and values). */
#ifndef PHASEWISE_FAMILIES_BYTE_SCALE_H
#define PHASEWISE_FAMILIES_BYTE_SCALE_H

/* Magnitudes as integers order as floats do, with infinity and NaN on top. */
PW_INLINE vi magnitudes(const float *x) { return vi_and(v_bits(v_load(x)), vi_set1(0x7FFFFFFF)); }

/* How values of which the largest magnitude has these bits become bytes: q = rint(x * inverse), x ~ scale * q. */
typedef struct {
    float scale, inverse;
} byte_scale;

PW_INLINE byte_scale byte_scale_of(uint32_t top_bits) {
    float top = pw_bits_to_float(top_bits);
    if (top_bits >= 0x7F800000u) return (byte_scale){NAN, 0.0f};
    if (top < 0x1p-100f) return (byte_scale){0.0f, 0.0f};
    return (byte_scale){top / 127.0f, 127.0f / top};
}

/* x[count] to q; their sum. */
PW_INLINE int32_t quantise_values(int count, const float *x, byte_scale s, int8_t *q) {
    vi total = vi_set1(0);
    for (int i = 0; i < count; i += LANES) {
        vi rounded = s.inverse != 0.0f ? v_round(v_mul(v_load(x + i), v_set1(s.inverse))) : vi_set1(0);
        total = vi_add(total, rounded);
        vi_store_i8(q + i, rounded);
    }
    return vi_sum(total);
}

static inline uint32_t largest_magnitude(int64_t k, const float *x) {
    vi magnitude = vi_set1(0);
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) magnitude = vi_max(magnitude, magnitudes(x + i));
    uint32_t top = (uint32_t)vi_max_all(magnitude);
    for (; i < k; ++i) {
        uint32_t bits = pw_float_to_bits(x[i]) & 0x7FFFFFFFu;
        if (bits > top) top = bits;
    }
    return top;
}

#endif
