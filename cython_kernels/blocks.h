/* Kinds of weights in blocks (K-quants and their kin): how a block lies in memory. Layout and meaning: blocks.py.
 *
 * This is storage alone. Once codes are bytes and scales float32, a block's groups are multiplied like those of q8, or of
 * q4: pw_arithmetic_kind says which, and forms of prepared rows are that kind's. */
#ifndef PHASEWISE_BLOCKS_H
#define PHASEWISE_BLOCKS_H

#include <stdint.h>

/* Every kind in blocks and its format: X(kind, fields of pw_block_format). In the order of packing.py's kinds. */
#define PW_BLOCK_FORMATS(X)                                                                                            \
    X(Q2_K, .inputs = 256, .group = 16, .low_bits = 2, .scaling = PW_SUPER_HALVES)                                     \
    X(Q3_K, .inputs = 256, .group = 16, .low_bits = 2, .high_bits = 1, .zero_point = 4, .scaling = PW_SUPER, .sub_zero = 32) \
    X(Q4_K, .inputs = 256, .group = 32, .low_bits = 4, .scaling = PW_SUPER_MINS)                                       \
    X(Q5_K, .inputs = 256, .group = 32, .low_bits = 4, .high_bits = 1, .scaling = PW_SUPER_MINS)                       \
    X(Q6_K, .inputs = 256, .group = 16, .low_bits = 4, .high_bits = 2, .zero_point = 32, .scaling = PW_SUPER, .sub_zero = 128) \
    X(IQ4_XS, .inputs = 256, .group = 32, .low_bits = 4, .zero_point = 128, .scaling = PW_SUPER, .sub_zero = 32,       \
      .table = PW_IQ4_TABLE)                                                                                           \
    X(IQ4_NL, .inputs = 32, .group = 32, .low_bits = 4, .zero_point = 128, .scaling = PW_HALF, .table = PW_IQ4_TABLE)  \
    X(MXFP4, .inputs = 32, .group = 32, .low_bits = 4, .zero_point = 128, .scaling = PW_EXPONENT, .table = PW_FP4_TABLE) \
    X(NVFP4, .inputs = 32, .group = 16, .low_bits = 4, .zero_point = 128, .scaling = PW_E4M3, .table = PW_FP4_TABLE)   \
    X(FP8, .inputs = 128, .group = 32, .low_bits = 8, .scaling = PW_FLOAT)                                             \
    X(Q5_0, .inputs = 32, .group = 32, .low_bits = 4, .high_bits = 1, .zero_point = 16, .scaling = PW_HALF)            \
    X(Q5_1, .inputs = 32, .group = 32, .low_bits = 4, .high_bits = 1, .scaling = PW_HALF_MINS)

#define PW_BLOCK_KIND(kind, ...) PW_##kind,
typedef enum { PW_F32, PW_BF16, PW_F16, PW_Q8, PW_Q4, PW_BLOCK_FORMATS(PW_BLOCK_KIND) PW_KINDS } pw_kind;

/* What scales the codes of a block: two levels (a byte for each group, float16 for all), or one. */
typedef enum {
    PW_HALF,         /* float16 */
    PW_HALF_MINS,    /* float16, and as many minima, which are added */
    PW_EXPONENT,     /* 2^(byte - 128) */
    PW_FLOAT,        /* float32, of codes that are numbers in e4m3 */
    PW_E4M3,         /* half of a byte in e4m3, of no sign, for each group, times the output's factor */
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

/* Inputs of a panel's 16 columns in 64 bytes: 1 (f32), 2 (bf16, f16), 4 (q8) or 8 (q4). */
static inline __attribute__((always_inline)) int pw_inputs_of_row(int32_t kind) {
    return 1 << (kind < PW_F16 ? kind : kind - 1);
}

static inline int pw_in_blocks(int32_t kind) { return kind > PW_Q4 && kind < PW_KINDS; }

/* Of a kind in blocks; folded by the compiler where the kind is a constant. */
static inline __attribute__((always_inline)) pw_block_format pw_block_format_of(int32_t kind) {
#define PW_BLOCK_CASE(kind, ...) \
    case PW_##kind: return (pw_block_format){__VA_ARGS__};
    switch (kind) { PW_BLOCK_FORMATS(PW_BLOCK_CASE) }
    __builtin_trap(); /* kinds are checked where weights come in */
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
    return f.scaling < PW_E4M3 ? 0 : f.scaling == PW_SUPER_MINS ? 2 * groups : groups;
}
static inline __attribute__((always_inline)) int64_t pw_block_bytes(pw_block_format f) {
    int64_t top = f.scaling == PW_E4M3 ? 0 : f.scaling == PW_EXPONENT ? 16 : pw_has_mins(f) || f.scaling == PW_FLOAT ? 64 : 32;
    return pw_block_codes_bytes(f) + pw_block_subs_bytes(f) + top;
}

/* The kind whose products those of a weight are: the dots of bytes or of nibbles, or the multiply-adds of float32, which
 * float16 and e4m3 become as they are read. */
static inline int32_t pw_arithmetic_kind(int32_t kind) {
    if (kind == PW_F16 || kind == PW_FP8) return PW_F32;
    return kind == PW_Q4_K ? PW_Q4 : pw_in_blocks(kind) ? PW_Q8 : kind;
}

#endif
