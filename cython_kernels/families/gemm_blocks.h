/* A panel's block in registers: codes, scales and minima (gemm_blocks.c, gemm_blockwise.c), and where it is unpacked to. */
#ifndef PHASEWISE_FAMILIES_GEMM_BLOCKS_H
#define PHASEWISE_FAMILIES_GEMM_BLOCKS_H

#include "families/gemm_tiles.h"

enum { QUADS = PW_K_MULTIPLE / 4, VECTOR_BYTES = LANES * 4 };

/* What codes stand for, above 128 (blocks.py). */
static const uint8_t iq4_table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t fp4_table[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

/* Parts of one panel's block; tops are the factors of its outputs where it has none itself. */
typedef struct {
    const uint8_t *low, *high, *subs, *tops;
} block_parts;

PW_INLINE block_parts parts_of(pw_block_format f, const uint8_t *block, const uint8_t *factors) {
    const uint8_t *high = block + f.inputs * f.low_bits * 2, *subs = block + pw_block_codes_bytes(f);
    return (block_parts){block, high, subs, f.scaling == PW_E4M3 ? factors : subs + pw_block_subs_bytes(f)};
}

/* Shifts by constants alone, whatever the optimisation. */
PW_INLINE vi shifted(vi v, int left) {
    switch (left) {
    case 4: return vi_shl(v, 4);
    case 3: return vi_shl(v, 3);
    case 2: return vi_shl(v, 2);
    case 1: return vi_shl(v, 1);
    case -1: return vi_shr(v, 1);
    case -2: return vi_shr(v, 2);
    case -3: return vi_shr(v, 3);
    case -4: return vi_shr(v, 4);
    case -5: return vi_shr(v, 5);
    case -6: return vi_shr(v, 6);
    default: return v;
    }
}

/* Bits of quad `quad` from a plane of `bits` bits a code, moved up to `place`. */
PW_INLINE vi plane_bits(const uint8_t *plane, int bits, int place, int64_t slot, int quad, int vector) {
    int quads = 8 / bits;
    vi packed = vi_load(plane + (slot * QUADS / quads + quad / quads) * VECTOR_ROW_BYTES + vector * VECTOR_BYTES);
    return vi_and(shifted(packed, place - bits * (quad % quads)), vi_set1((((1 << bits) - 1) << place) * 0x01010101));
}

/* Quad `quad` of slot `slot`, 32 inputs of a block, as bytes. */
PW_INLINE vi code_quad(pw_block_format f, const block_parts *parts, int64_t slot, int quad, int vector) {
    if (f.low_bits == 8) return vi_load(parts->low + (slot * QUADS + quad) * VECTOR_ROW_BYTES + vector * VECTOR_BYTES);
    vi codes = plane_bits(parts->low, f.low_bits, 0, slot, quad, vector);
    if (f.high_bits) codes = vi_or(codes, plane_bits(parts->high, f.high_bits, f.low_bits, slot, quad, vector));
    if (f.table == PW_IQ4_TABLE) return vi_look_up(vi_table(iq4_table), codes);
    if (f.table == PW_FP4_TABLE) return vi_look_up(vi_table(fp4_table), codes);
    return codes;
}

/* Byte `byte` of each lane, which is a number in e4m3, divided by E4M3_UNIT: its bits in their places of a float32. */
#define E4M3_UNIT 0x1p120f
PW_INLINE vf e4m3_units(vi quads, int byte) {
    vi top = vi_shl(quads, 24 - 8 * byte);
    return vi_as_vf(vi_or(vi_and(top, vi_set1(INT32_MIN)), vi_and(vi_shr(top, 4), vi_set1(0x07F00000))));
}

/* The scales of a whole block; minima with the sign that they are added with, or the smaller parts of factors. */
typedef struct {
    vf scales[VECTORS], mins[VECTORS];
} block_tops;

PW_INLINE void load_tops(pw_block_format f, const block_parts *parts, block_tops *out) {
    const uint16_t *halves = (const uint16_t *)(const void *)parts->tops;
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
        if (f.scaling == PW_EXPONENT) {
            vi bits = vi_max(vi_shl(vi_load_u8(parts->tops + v * LANES), 23), vi_set1(0x00400000));
            out->scales[v] = v_mul(vi_as_vf(bits), v_set1(0.5f));
        } else if (f.scaling == PW_E4M3 || f.scaling == PW_FLOAT) {
            const float *floats = (const float *)(const void *)parts->tops;
            out->scales[v] = v_load(floats + v * LANES);
            if (f.scaling == PW_E4M3) out->mins[v] = v_load(floats + PW_PANEL + v * LANES);
        } else {
            out->scales[v] = v_load_f16(halves + v * LANES);
        }
        if (!pw_has_mins(f)) continue;
        vf mins = v_load_f16(halves + PW_PANEL + v * LANES);
        out->mins[v] = f.scaling == PW_HALF_MINS ? mins : v_mul(v_set1(-1.0f), mins);
    }
}

PW_INLINE vf group_scale(pw_block_format f, const block_parts *parts, const block_tops *tops, int64_t group, int v) {
    if (f.scaling < PW_E4M3) return tops->scales[v];
    vi sub = vi_load_u8(parts->subs + group * PW_PANEL + v * LANES);
    if (f.scaling == PW_E4M3) {
        vf number = v_mul(e4m3_units(sub, 0), v_set1(E4M3_UNIT / 2));
        return v_fma(number, tops->scales[v], v_mul(number, tops->mins[v]));
    }
    if (f.scaling == PW_SUPER_HALVES) sub = vi_and(sub, vi_set1(15));
    if (f.sub_zero) sub = vi_sub(sub, vi_set1(f.sub_zero));
    return v_mul(tops->scales[v], vi_to_vf(sub));
}

PW_INLINE vf group_min(pw_block_format f, const block_parts *parts, const block_tops *tops, int64_t group, int v) {
    if (f.scaling < PW_SUPER) return tops->mins[v];
    int64_t before = f.scaling == PW_SUPER_MINS ? f.inputs / f.group : 0;
    vi sub = vi_load_u8(parts->subs + (before + group) * PW_PANEL + v * LANES);
    if (f.scaling == PW_SUPER_HALVES) sub = vi_shr(sub, 4);
    return v_mul(tops->mins[v], vi_to_vf(sub));
}

/* Whether FLOAT_BIAS times a scale is exact. Exponents have scales up to 2^127, factors of outputs any bits. */
PW_INLINE int has_exact_offsets(pw_block_format f) {
    return PW_FMA_ROUNDS_ONCE && f.scaling != PW_EXPONENT && f.scaling != PW_E4M3;
}

/* What is `ahead` of one slot's share of the blocks. */
PW_INLINE void prefetch_slot(const tile_call *t, const uint8_t *block, pw_block_format f, int64_t slot, int np,
                             int64_t ahead) {
    int64_t slots = f.inputs / PW_K_MULTIPLE, bytes = pw_block_bytes(f);
    for (int64_t at = slot * bytes / slots; at < (slot + 1) * bytes / slots; at += VECTOR_ROW_BYTES) {
        PW_UNROLL for (int p = 0; p < np; ++p) ask_for(block + p * t->panel_bytes + at + ahead, t->next.far);
    }
}

/* Rows of the tiles that read blocks as they are, and the rows that meet blocks so, tile by tile, because unpacking for
 * them would cost more. Where dots have no 32 bits, larger tiles spill what they save. */
#if LANES == 16
#define BLOCK_TILES(X, of...) PW_ROWS_8(X, 1, of)
enum { BLOCK_MR = 8, BLOCK_ROWS = 16 };
#elif LANES == 8 && !PW_DOT_HALVES
#define BLOCK_TILES(X, of...) PW_ROWS_6(X, 1, of)
enum { BLOCK_MR = 6, BLOCK_ROWS = 12 };
#elif LANES == 8 || defined(PW_NEON)
#define BLOCK_TILES(X, of...) PW_ROWS_4(X, 1, of)
enum { BLOCK_MR = 4, BLOCK_ROWS = LANES == 8 ? 16 : 8 };
#else
#define BLOCK_TILES(X, of...) PW_ROWS_2(X, 1, of)
enum { BLOCK_MR = 2, BLOCK_ROWS = 8 };
#endif

/* Where slots of 32 inputs of one panel go: bytes [8 quads][16][4], or NULL for none; float32 [32 / group][16]: scales,
 * -FLOAT_BIAS times the scales where that is exact, minima where the kind has them. */
typedef struct {
    uint8_t *codes;
    float *scales, *offsets, *mins;
} unpacked_slots;

PW_INLINE void move_on(unpacked_slots *to, int64_t codes, int64_t floats) {
    if (to->codes) to->codes += codes;
    to->scales += floats;
    to->offsets += floats;
    to->mins += floats;
}

/* Slots `slot` to `end` of a panel that begins with this block; lines are asked for `ahead` bytes before they are read.
 * `factors`: of the panel's outputs, where the kind has them. */
typedef void unpack_slots(const uint8_t *block, const void *factors, int64_t slot, int64_t end, int64_t ahead,
                          const unpacked_slots *to);

extern unpack_slots *const ISA(block_unpackers)[PW_KINDS];

#endif
