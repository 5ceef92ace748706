/* The words of AVX512-FP16 in C, over the portable vocabulary: each result is rounded once, to the nearest even. */
#pragma GCC diagnostic ignored "-Wunused-function" /* not every family has words for them */
#include "simd/portable.h"

#define PW_F16_WORDS 1

/* A sum that a double does not hold gets an odd last bit, so that rounding it again rounds the sum itself. */
static double odd_sum(double a, double b) {
    double sum = a + b, part = sum - a, rest = (a - (sum - part)) + (b - part);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return rest == 0.0 || bits % 2 ? sum : nextafter(sum, rest > 0.0 ? INFINITY : -INFINITY);
}

static uint16_t nearest_f16(double x) {
    int exponent;
    frexp(x, &exponent);
    double unit = ldexp(1.0, exponent - 11 < -24 ? -24 : exponent - 11);
    return pw_to_f16((float)(nearbyint(x / unit) * unit)); /* a float16, or too large for one */
}

static uint16_t half_of(vi v, int i) { return (uint16_t)((uint32_t)v[i / 2] >> i % 2 * 16); }
static vi with_half(vi v, int i, uint16_t half) {
    int shift = i % 2 * 16;
    v[i / 2] = (int32_t)(((uint32_t)v[i / 2] & ~(0xFFFFu << shift)) | (uint32_t)half << shift);
    return v;
}

static vi f16_fma(vi acc, vi w, vi a) {
    for (int i = 0; i < 2 * LANES; ++i) {
        double product = (double)pw_from_f16(half_of(w, i)) * (double)pw_from_f16(half_of(a, i));
        acc = with_half(acc, i, nearest_f16(odd_sum(product, (double)pw_from_f16(half_of(acc, i)))));
    }
    return acc;
}
PW_INLINE vi f16_add(vi a, vi b) {
    for (int i = 0; i < 2 * LANES; ++i) {
        a = with_half(a, i, nearest_f16((double)pw_from_f16(half_of(a, i)) + (double)pw_from_f16(half_of(b, i))));
    }
    return a;
}
PW_INLINE vi f16_swapped(vi a) { return vi_or(vi_shl(a, 16), vi_shr(a, 16)); }
PW_INLINE vf f16_upper(vi a) { return vi_as_vf((a >> 3) & vi_set1((int32_t)0x8FFFE000)); }
PW_INLINE vi f16_from_bf16(vi w, vi less) {
    for (int i = 0; i < 2 * LANES; ++i) {
        uint16_t bits = half_of(w, i), magnitude = bits & 0x7FFF, away = half_of(less, i);
        magnitude = magnitude > away ? (uint16_t)((magnitude - away) << 3) : 0;
        w = with_half(w, i, magnitude | (bits & 0x8000));
    }
    return w;
}

#define F16_TILES(X, of...) DENSE_TILES(X, of) X(5, 1, of)
