/* Kinds of weights in blocks (K-quants and their kin): how a block lies in memory. Layout and meaning: blocks.py.
 *
 * This is storage alone. Once codes are bytes and scales float32, a block's groups are multiplied like those of q8, or of
 * q4: pw_arithmetic_kind says which, and forms of prepared rows are that kind's. */
#ifndef PHASEWISE_BLOCKS_H
#define PHASEWISE_BLOCKS_H

#include <stdint.h>

typedef enum { PW_F32, PW_BF16, PW_Q8, PW_Q4, PW_Q2_K, PW_Q3_K, PW_Q4_K, PW_Q5_K, PW_Q6_K, PW_IQ4_XS, PW_IQ4_NL, PW_MXFP4,
               PW_Q5_0, PW_Q5_1, PW_KINDS } pw_kind;

/* What scales the codes of a block: two levels (a byte for each group, float16 for all), or one. */
typedef enum {
    PW_HALF,         /* float16 */
    PW_HALF_MINS,    /* float16, and as many minima, which are added */
    PW_EXPONENT,     /* 2^(byte - 128) */
    PW_SUPER,        /* float16 times (byte - sub_zero) */
    PW_SUPER_MINS,   /* float16 times byte, less float16 times byte */
    PW_SUPER_HALVES, /* the same with both bytes in the halves of one */
} pw_scaling;

typedef enum { PW_NO_TABLE, PW_IQ4_TABLE, PW_FP4_TABLE } pw_table;

typedef struct {
    int inputs, group;
    int low_bits, high_bits; /* of a code */
    int zero_point;          /* of codes, or of what they stand for in the table */
    pw_scaling scaling;
    int sub_zero;
    pw_table table;
} pw_block_format;

static inline int pw_in_blocks(int32_t kind) { return kind > PW_Q4 && kind < PW_KINDS; }

/* Of a kind in blocks; folded by the compiler where the kind is a constant. */
static inline __attribute__((always_inline)) pw_block_format pw_block_format_of(int32_t kind) {
    switch (kind) {
    case PW_Q2_K: return (pw_block_format){256, 16, 2, 0, 0, PW_SUPER_HALVES, 0, PW_NO_TABLE};
    case PW_Q3_K: return (pw_block_format){256, 16, 2, 1, 4, PW_SUPER, 32, PW_NO_TABLE};
    case PW_Q4_K: return (pw_block_format){256, 32, 4, 0, 0, PW_SUPER_MINS, 0, PW_NO_TABLE};
    case PW_Q5_K: return (pw_block_format){256, 32, 4, 1, 0, PW_SUPER_MINS, 0, PW_NO_TABLE};
    case PW_Q6_K: return (pw_block_format){256, 16, 4, 2, 32, PW_SUPER, 128, PW_NO_TABLE};
    case PW_IQ4_XS: return (pw_block_format){256, 32, 4, 0, 128, PW_SUPER, 32, PW_IQ4_TABLE};
    case PW_IQ4_NL: return (pw_block_format){32, 32, 4, 0, 128, PW_HALF, 0, PW_IQ4_TABLE};
    case PW_MXFP4: return (pw_block_format){32, 32, 4, 0, 128, PW_EXPONENT, 0, PW_FP4_TABLE};
    case PW_Q5_0: return (pw_block_format){32, 32, 4, 1, 16, PW_HALF, 0, PW_NO_TABLE};
    default: return (pw_block_format){32, 32, 4, 1, 0, PW_HALF_MINS, 0, PW_NO_TABLE}; /* q5_1 */
    }
}

static inline __attribute__((always_inline)) int pw_has_mins(pw_block_format f) {
    return f.scaling == PW_HALF_MINS || f.scaling == PW_SUPER_MINS || f.scaling == PW_SUPER_HALVES;
}

/* Whether blocks have 256 inputs and scales of two levels. */
static inline __attribute__((always_inline)) int pw_has_subs(int32_t kind) {
    return pw_in_blocks(kind) && pw_block_format_of(kind).scaling >= PW_SUPER;
}

/* Bytes of the sub-scales of a panel's block, sub-minima included; of all that comes before them; of the whole block. */
static inline __attribute__((always_inline)) int64_t pw_block_codes_bytes(pw_block_format f) {
    return (int64_t)f.inputs * (f.low_bits + f.high_bits) * 2;
}
static inline __attribute__((always_inline)) int64_t pw_block_subs_bytes(pw_block_format f) {
    int64_t groups = 16 * (int64_t)(f.inputs / f.group);
    return f.scaling < PW_SUPER ? 0 : f.scaling == PW_SUPER_MINS ? 2 * groups : groups;
}
static inline __attribute__((always_inline)) int64_t pw_block_bytes(pw_block_format f) {
    int64_t top = f.scaling == PW_EXPONENT ? 16 : pw_has_mins(f) ? 64 : 32;
    return pw_block_codes_bytes(f) + pw_block_subs_bytes(f) + top;
}

/* The kind whose integer dots compute a quantised weight. */
static inline int32_t pw_arithmetic_kind(int32_t kind) {
    return kind == PW_Q4_K ? PW_Q4 : pw_in_blocks(kind) ? PW_Q8 : kind;
}

#endif
