/* What every vocabulary shares: names per ISA, inlining, and the two 16-bit float formats in scalar C. */
#ifndef PHASEWISE_SIMD_COMMON_H
#define PHASEWISE_SIMD_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PW_JOIN_(a, b, c) a##_##b##_##c
#define PW_JOIN(a, b, c) PW_JOIN_(a, b, c)
#define ISA(name) PW_JOIN(pw, PW_ISA, name) /* pw_avx2_gemm: one symbol per ISA from one source */

#define PW_INLINE static inline __attribute__((always_inline, unused))
#define PW_UNROLL _Pragma("GCC unroll 64")

PW_INLINE float pw_bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

PW_INLINE uint32_t pw_float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Exact; subnormals, infinities and NaN included. */
PW_INLINE float pw_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
    if (magnitude >= 0x7C00u) return pw_bits_to_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    /* 2^112 moves the exponent from bias 15 to bias 127, and normalises subnormals in passing. */
    float scaled = pw_bits_to_float(magnitude << 13) * 0x1p112f;
    return pw_bits_to_float(sign | pw_float_to_bits(scaled));
}

/* Round to nearest even; too large becomes infinity, NaN stays NaN. */
PW_INLINE uint16_t pw_to_f16(float x) {
    uint32_t bits = pw_float_to_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits */
        float shifted = pw_bits_to_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (pw_float_to_bits(shifted) - 0x3F000000u));
    }
    uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

PW_INLINE float pw_from_bf16(uint16_t h) { return pw_bits_to_float((uint32_t)h << 16); }

/* Round to nearest even; NaN stays NaN. */
PW_INLINE uint16_t pw_to_bf16(float x) {
    uint32_t bits = pw_float_to_bits(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

#endif
