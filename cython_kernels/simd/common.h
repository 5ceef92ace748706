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

/* X(1, panels) .. X(n, panels): the micro-kernels of one width. */
#define PW_ROWS_1(X, panels, of...) X(1, panels, of)
#define PW_ROWS_2(X, panels, of...) PW_ROWS_1(X, panels, of) X(2, panels, of)
#define PW_ROWS_3(X, panels, of...) PW_ROWS_2(X, panels, of) X(3, panels, of)
#define PW_ROWS_4(X, panels, of...) PW_ROWS_3(X, panels, of) X(4, panels, of)
#define PW_ROWS_5(X, panels, of...) PW_ROWS_4(X, panels, of) X(5, panels, of)
#define PW_ROWS_6(X, panels, of...) PW_ROWS_5(X, panels, of) X(6, panels, of)
#define PW_ROWS_7(X, panels, of...) PW_ROWS_6(X, panels, of) X(7, panels, of)
#define PW_ROWS_8(X, panels, of...) PW_ROWS_7(X, panels, of) X(8, panels, of)
#define PW_ROWS_9(X, panels, of...) PW_ROWS_8(X, panels, of) X(9, panels, of)
#define PW_ROWS_10(X, panels, of...) PW_ROWS_9(X, panels, of) X(10, panels, of)
#define PW_ROWS_11(X, panels, of...) PW_ROWS_10(X, panels, of) X(11, panels, of)
#define PW_ROWS_12(X, panels, of...) PW_ROWS_11(X, panels, of) X(12, panels, of)
#define PW_ROWS_13(X, panels, of...) PW_ROWS_12(X, panels, of) X(13, panels, of)
#define PW_ROWS_14(X, panels, of...) PW_ROWS_13(X, panels, of) X(14, panels, of)
#define PW_ROWS_15(X, panels, of...) PW_ROWS_14(X, panels, of) X(15, panels, of)
#define PW_ROWS_16(X, panels, of...) PW_ROWS_15(X, panels, of) X(16, panels, of)
#define PW_ROWS_17(X, panels, of...) PW_ROWS_16(X, panels, of) X(17, panels, of)
#define PW_ROWS_18(X, panels, of...) PW_ROWS_17(X, panels, of) X(18, panels, of)
#define PW_ROWS_19(X, panels, of...) PW_ROWS_18(X, panels, of) X(19, panels, of)
#define PW_ROWS_20(X, panels, of...) PW_ROWS_19(X, panels, of) X(20, panels, of)
#define PW_ROWS_21(X, panels, of...) PW_ROWS_20(X, panels, of) X(21, panels, of)
#define PW_ROWS_22(X, panels, of...) PW_ROWS_21(X, panels, of) X(22, panels, of)
#define PW_ROWS_23(X, panels, of...) PW_ROWS_22(X, panels, of) X(23, panels, of)
#define PW_ROWS_24(X, panels, of...) PW_ROWS_23(X, panels, of) X(24, panels, of)
#define PW_ROWS_25(X, panels, of...) PW_ROWS_24(X, panels, of) X(25, panels, of)
#define PW_ROWS_26(X, panels, of...) PW_ROWS_25(X, panels, of) X(26, panels, of)
#define PW_ROWS_27(X, panels, of...) PW_ROWS_26(X, panels, of) X(27, panels, of)
#define PW_ROWS_28(X, panels, of...) PW_ROWS_27(X, panels, of) X(28, panels, of)
#define PW_ROWS_29(X, panels, of...) PW_ROWS_28(X, panels, of) X(29, panels, of)
#define PW_ROWS_30(X, panels, of...) PW_ROWS_29(X, panels, of) X(30, panels, of)

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
