/* The vocabulary in GCC/Clang vector extensions: four lanes on any CPU. */
#include "cpu.h"
#include "simd/common.h"

#define LANES 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

PW_INLINE vf v_set1(float x) { return (vf){x, x, x, x}; }
PW_INLINE vf v_zero(void) { return v_set1(0.0f); }
PW_INLINE vf v_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
PW_INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
PW_INLINE vf v_add(vf a, vf b) { return a + b; }
PW_INLINE vf v_sub(vf a, vf b) { return a - b; }
PW_INLINE vf v_mul(vf a, vf b) { return a * b; }
PW_INLINE vf v_div(vf a, vf b) { return a / b; }
/* a b + c, rounded once. The product is exact in double. Its sum with c is rounded to odd: an inexact sum whose last bit is 0
 * moves by one towards what was rounded off, so that the rounding to float sees that there was more (Boldo and Melquiond 2008). */
#define PW_FMA_IN_DOUBLE 1
static __attribute__((noinline, cold, unused)) vf fma_in_double(vf a, vf b, vf c) {
    typedef double doubles __attribute__((vector_size(32)));
    typedef int64_t longs __attribute__((vector_size(32)));
    doubles product = __builtin_convertvector(a, doubles) * __builtin_convertvector(b, doubles);
    doubles addend = __builtin_convertvector(c, doubles), sum = product + addend, added = sum - product;
    doubles lost = (product - (sum - added)) + (addend - added);
    longs above = lost > 0.0, inexact = above | (lost < 0.0), turned = above ^ (sum > 0.0);
    longs bits = (longs)sum, is_even = (bits & 1) - 1;
    bits += (2 * turned + 1) & inexact & is_even;
    return __builtin_convertvector((doubles)bits, vf);
}
/* As on every ISA, by the CPU's instruction where it has one. PW_FMA_ROUNDS_ONCE is not defined: there are cheaper ways than one
 * more of these. */
PW_INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#elif defined(__x86_64__)
    if (__builtin_expect(pw_cpu_fuses, 1)) { /* assembly: the compiler is told of no such instruction */
        __asm__("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
        return c;
    }
#endif
    return fma_in_double(a, b, c);
}
PW_INLINE vf v_max(vf a, vf b) { vi m = a > b; return (vf)(((vi)a & m) | ((vi)b & ~m)); } /* b where either is NaN */
PW_INLINE vf v_min(vf a, vf b) { vi m = a < b; return (vf)(((vi)a & m) | ((vi)b & ~m)); }
PW_INLINE float v_sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
PW_INLINE float v_max_all(vf v) { vf w = v_max(v, (vf){v[2], v[3], v[2], v[3]}); return w[0] > w[1] ? w[0] : w[1]; }
PW_INLINE vf v_load_f16(const uint16_t *p) {
    return (vf){pw_from_f16(p[0]), pw_from_f16(p[1]), pw_from_f16(p[2]), pw_from_f16(p[3])};
}
PW_INLINE void v_store_f16(uint16_t *p, vf v) { for (int i = 0; i < 4; ++i) p[i] = pw_to_f16(v[i]); }

/* The first n of LANES values; the rest reads as zero and is not written. No byte beyond them is touched. */
PW_INLINE vf v_load_n(const float *p, int n) { vf v = v_zero(); memcpy(&v, p, 4 * (size_t)n); return v; }
PW_INLINE void v_store_n(float *p, vf v, int n) { memcpy(p, &v, 4 * (size_t)n); }

PW_INLINE vi vi_set1(int32_t x) { return (vi){x, x, x, x}; }
PW_INLINE vi vi_load(const void *p) { vi v; memcpy(&v, p, sizeof v); return v; }
PW_INLINE void vi_store(void *p, vi v) { memcpy(p, &v, sizeof v); }
PW_INLINE vi vi_add(vi a, vi b) { return a + b; }
PW_INLINE vi vi_sub(vi a, vi b) { return a - b; }
PW_INLINE vi vi_and(vi a, vi b) { return a & b; }
PW_INLINE vi vi_or(vi a, vi b) { return a | b; }
PW_INLINE vi vi_max(vi a, vi b) { vi m = a > b; return (a & m) | (b & ~m); }
#define vi_shl(v, bits) ((vi)((vu)(v) << (bits)))
#define vi_shr(v, bits) ((vi)((vu)(v) >> (bits))) /* logical */
PW_INLINE vf vi_to_vf(vi v) { return __builtin_convertvector(v, vf); }
PW_INLINE vi v_bits(vf v) { return (vi)v; }
PW_INLINE vf vi_as_vf(vi v) { return (vf)v; }
/* Nearest even for |v| < 2^22: the sum's last place is 1. */
PW_INLINE vi v_round(vf v) { return (vi)(v + v_set1(12582912.0f)) - vi_set1(0x4B400000); }
PW_INLINE int32_t vi_sum(vi v) { return v[0] + v[1] + v[2] + v[3]; }
PW_INLINE int32_t vi_max_all(vi v) {
    vi w = vi_max(v, (vi){v[2], v[3], v[2], v[3]});
    return w[0] > w[1] ? w[0] : w[1];
}
PW_INLINE void vi_store_i8(int8_t *p, vi v) { for (int i = 0; i < 4; ++i) p[i] = (int8_t)v[i]; }

/* LANES bytes, unsigned. A table of 16 bytes, and of each byte of v, below 16, what it holds there. */
PW_INLINE vi vi_load_u8(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
PW_INLINE vi vi_table(const uint8_t *p) { return vi_load(p); }
PW_INLINE vi vi_look_up(vi table, vi v) {
    uint8_t values[16], found[16];
    memcpy(values, &table, 16);
    memcpy(found, &v, 16);
    for (int i = 0; i < 16; ++i) found[i] = values[found[i] & 15];
    return vi_load(found);
}

/* Dot words (gemm_quant.c): quads of unsigned weights times quads of signed activations, exact in int32. */
enum { Q8_ACTIVATION_BYTES = 1, Q8_WEIGHT_OFFSET = 0 };
typedef struct { int32_t a[4]; } va8;
PW_INLINE va8 va8_load(const uint8_t *quads, int quad) {
    const int8_t *p = (const int8_t *)quads + 4 * quad;
    return (va8){{p[0], p[1], p[2], p[3]}};
}
PW_INLINE vi q8_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q8_dot(vi acc, vi w, va8 a) {
    vi byte = vi_set1(255);
    acc += (w & byte) * vi_set1(a.a[0]) + (vi_shr(w, 8) & byte) * vi_set1(a.a[1]);
    return acc + ((vi_shr(w, 16) & byte) * vi_set1(a.a[2]) + vi_shr(w, 24) * vi_set1(a.a[3]));
}
typedef va8 va4;
PW_INLINE va4 va4_load(const uint8_t *quads, int quad) { return va8_load(quads, quad); }
PW_INLINE vi q4_begin(int32_t bias) { return vi_set1(bias); }
PW_INLINE vi q4_dot(vi acc, vi w, va4 a) { return q8_dot(acc, w, a); }
PW_INLINE vi q4_end(vi acc, int32_t bias) { (void)bias; return acc; }

/* Dots of blocks (gemm_blockwise.c): of codes above 128 less WIDE_DOT_OFFSET; dots times the words of sub-scales; int16 pairs. */
#define PW_DOT_HALVES 0
enum { WIDE_DOT_OFFSET = 0 };
PW_INLINE vi wide_dot(vi acc, vi w, va4 a) { return q8_dot(acc, w, a); }
PW_INLINE vi add_scaled(vi acc, vi dots, vi words) { return acc + dots * words; }
PW_INLINE vi pair_dot(vi acc, vi w, vi a) {
    return acc + ((vi)((vu)w << 16) >> 16) * ((vi)((vu)a << 16) >> 16) + (w >> 16) * (a >> 16);
}

/* Micro-kernels (rows x panels) that are worth having with these registers. */
#define DENSE_TILES(X, of...) PW_ROWS_4(X, 1, of) PW_ROWS_2(X, 2, of)
#define QUANT_TILES(X, of...) PW_ROWS_4(X, 1, of)
#define COLUMN_TILES(X, of...) PW_ROWS_4(X, 1, of) /* of one int32 sum each */
enum { COLUMN_MR = 4, COLUMN_PANELS = 1 };
enum { QUANT_TILE_HELD = 4 }; /* vectors of float sums that fit beside as many integer sums */
/* The fastest of them over many rows; panels to read at once where one or two rows stream. */
enum { DENSE_MR = 4, DENSE_PANELS = 1, QUANT_MR = 4, QUANT_PANELS = 1, STREAM_PANELS = 1 };
enum { DENSE_TALL_MR = 0, DENSE_TALL_PANELS = 0, F16_TALLEST_MR = 0 }; /* for a few rows more than DENSE_MR; 0: none */
enum { QUANT_TALL_MR = 0, QUANT_TALL_PANELS = 0, QUANT_TALLEST_MR = 0 }; /* for a few rows more than QUANT_MR; 0: none */
