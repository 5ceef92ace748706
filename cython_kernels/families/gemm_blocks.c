/* families/gemm_blocks.c: weights in blocks (blocks.h), read as they are or unpacked; compiled once per ISA.
 *
 * Their arithmetic is that of gemm_quant.c, and so is the bound. A group's scale is the product of a float16 of 11 bits
 * and an integer of at most 8, which float32 holds exactly, as it does FLOAT_BIAS times that; so is its minimum. Rows that
 * one tile has meet the blocks by way of registers; for more, gemm_stage.c unpacks them once. Both give the same bits. */
#include "families/gemm.h"

enum { QUADS = PW_K_MULTIPLE / 4, VECTOR_BYTES = LANES * 4 };

/* What codes stand for, above 128 (blocks.py). */
static const uint8_t iq4_table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t fp4_table[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

/* Parts of one panel's block. */
typedef struct {
    const uint8_t *low, *high, *subs, *tops;
} block_parts;

PW_INLINE block_parts parts_of(pw_block_format f, const uint8_t *block) {
    const uint8_t *high = block + f.inputs * f.low_bits * 2, *subs = block + pw_block_codes_bytes(f);
    return (block_parts){block, high, subs, subs + pw_block_subs_bytes(f)};
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
    vi codes = plane_bits(parts->low, f.low_bits, 0, slot, quad, vector);
    if (f.high_bits) codes = vi_or(codes, plane_bits(parts->high, f.high_bits, f.low_bits, slot, quad, vector));
    if (f.table == PW_IQ4_TABLE) return vi_look_up(vi_table(iq4_table), codes);
    if (f.table == PW_FP4_TABLE) return vi_look_up(vi_table(fp4_table), codes);
    return codes;
}

/* The scales of a whole block; minima with the sign that they are added with. */
typedef struct {
    vf scales[VECTORS], mins[VECTORS];
} block_tops;

PW_INLINE void load_tops(pw_block_format f, const block_parts *parts, block_tops *out) {
    const uint16_t *halves = (const uint16_t *)(const void *)parts->tops;
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
        if (f.scaling == PW_EXPONENT) {
            vi bits = vi_max(vi_shl(vi_load_u8(parts->tops + v * LANES), 23), vi_set1(0x00400000));
            out->scales[v] = v_mul(vi_as_vf(bits), v_set1(0.5f));
        } else {
            out->scales[v] = v_load_f16(halves + v * LANES);
        }
        if (!pw_has_mins(f)) continue;
        vf mins = v_load_f16(halves + PW_PANEL + v * LANES);
        out->mins[v] = f.scaling == PW_HALF_MINS ? mins : v_mul(v_set1(-1.0f), mins);
    }
}

PW_INLINE vf group_scale(pw_block_format f, const block_parts *parts, const block_tops *tops, int64_t group, int v) {
    if (f.scaling < PW_SUPER) return tops->scales[v];
    vi sub = vi_load_u8(parts->subs + group * PW_PANEL + v * LANES);
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

/* ---- a few rows ------------------------------------------------------------------------------------------------- */

typedef struct {
    block_parts parts[MAX_TILE_PANELS];
    block_tops tops[MAX_TILE_PANELS];
} tile_blocks;

PW_INLINE void block_dots(const tile_call *t, int kind, const tile_blocks *blocks, int64_t slot, int half,
                          const uint8_t **rows, int_sums dot, int mr, int np) {
    pw_block_format f = pw_block_format_of(kind);
    vi w[MAX_TILE_PANELS * VECTORS];
    (void)t;
    if (pw_arithmetic_kind(kind) == PW_Q4) {
        PW_UNROLL for (int i = 0; i < QUADS / 2; ++i) {
            PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
                const uint8_t *low = blocks->parts[c / VECTORS].low + (slot * QUADS / 2 + i) * VECTOR_ROW_BYTES;
                w[c] = vi_load(low + c % VECTORS * VECTOR_BYTES);
            }
            PW_UNROLL for (int r = 0; r < mr; ++r) q4_row(dot[r], w, rows[r], i, np * VECTORS, broadcasts(r, np));
        }
        return;
    }
    PW_UNROLL for (int i = 0; i < f.group / 4; ++i) {
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
            w[c] = code_quad(f, &blocks->parts[c / VECTORS], slot, half * (f.group / 4) + i, c % VECTORS);
        }
        PW_UNROLL for (int r = 0; r < mr; ++r) q8_row(dot[r], w, rows[r], i, np * VECTORS, broadcasts(r, np));
    }
}

/* Whether FLOAT_BIAS times a scale is exact. Exponents have scales up to 2^127. */
PW_INLINE int has_exact_offsets(pw_block_format f) { return PW_FMA_ROUNDS_ONCE && f.scaling != PW_EXPONENT; }

/* acc += a (s D), then += (a sum q) m, for group `half` of 32 inputs. */
PW_INLINE void block_group(const tile_call *t, vf *acc, int kind, const tile_blocks *blocks, int64_t slot, int half,
                           const uint8_t **rows, int mr, int np) {
    pw_block_format f = pw_block_format_of(kind);
    int arithmetic = pw_arithmetic_kind(kind);
    group_place at = {.kind = arithmetic, .group = f.group, .rows = rows};
    at.fields_at = group_block_bytes(arithmetic, f.group) - 12;
    int_sums dot;
    PW_UNROLL for (int r = 0; r < mr; ++r) {
        int32_t bias = int_at(rows[r] + at.fields_at + 4);
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
            dot[r][c] = arithmetic == PW_Q8 ? q8_begin(bias) : q4_begin(bias);
        }
    }
    block_dots(t, kind, blocks, slot, half, rows, dot, mr, np);
    int64_t group = slot * (PW_K_MULTIPLE / f.group) + half;
    PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
        const block_parts *parts = &blocks->parts[c / VECTORS];
        const block_tops *tops = &blocks->tops[c / VECTORS];
        vf s = group_scale(f, parts, tops, group, c % VECTORS), offset = v_mul(v_set1(-FLOAT_BIAS), s);
        PW_UNROLL for (int r = 0; r < mr; ++r) {
            vf *sum = &acc[r * np * VECTORS + c], a = v_set1(float_at(rows[r] + at.fields_at));
            vf whole = finished(dot, &at, r, c);
            vf scaled = has_exact_offsets(f) ? v_fma(whole, s, offset) : v_mul(v_sub(whole, v_set1(FLOAT_BIAS)), s);
            *sum = v_fma(scaled, a, *sum);
        }
        if (!pw_has_mins(f)) continue;
        vf m = group_min(f, parts, tops, group, c % VECTORS);
        PW_UNROLL for (int r = 0; r < mr; ++r) {
            vf *sum = &acc[r * np * VECTORS + c];
            *sum = v_fma(v_set1(float_at(rows[r] + at.fields_at + 8)), m, *sum);
        }
    }
}

/* What is `ahead` of one slot's share of the blocks. */
PW_INLINE void prefetch_slot(const tile_call *t, const uint8_t *block, pw_block_format f, int64_t slot, int np,
                             int64_t ahead) {
    int64_t slots = f.inputs / PW_K_MULTIPLE, bytes = pw_block_bytes(f);
    for (int64_t at = slot * bytes / slots; at < (slot + 1) * bytes / slots; at += VECTOR_ROW_BYTES) {
        PW_UNROLL for (int p = 0; p < np; ++p) ask_for(block + p * t->panel_bytes + at + ahead, t->next.far);
    }
}

PW_INLINE void block_tile(const tile_call *t, int kind, int mr, int np) {
    pw_block_format f = pw_block_format_of(kind);
    int64_t bytes = pw_block_bytes(f), ahead = t->prefetch_bytes, turn = t->steps - ahead / bytes, b = 0;
    int64_t row_step = group_block_bytes(pw_arithmetic_kind(kind), f.group), slots = f.inputs / PW_K_MULTIPLE;
    const uint8_t *rows[MAX_MR];
    tile_blocks blocks;
    tile_sums acc;
    point_to_blocks(t, rows, mr);
    begin_sums(t, acc, mr, np * VECTORS);
    for (int half = 0; half < 2; ++half) {
        for (int64_t end = half ? t->steps : turn; b < end; ++b) {
            const uint8_t *first = t->values + b * bytes;
            PW_UNROLL for (int p = 0; p < np; ++p) {
                blocks.parts[p] = parts_of(f, first + p * t->panel_bytes);
                load_tops(f, &blocks.parts[p], &blocks.tops[p]);
            }
            for (int64_t slot = 0; slot < slots; ++slot) {
                if (ahead) prefetch_slot(t, first, f, slot, np, ahead);
                PW_UNROLL for (int part = 0; part < PW_K_MULTIPLE / f.group; ++part) {
                    block_group(t, acc, kind, &blocks, slot, part, rows, mr, np);
                    advance_blocks(rows, mr, row_step);
                }
            }
        }
        ahead += ahead ? t->prefetch_jump : 0;
    }
    end_sums(t, acc, mr, np * VECTORS);
}

#define BLOCK_KINDS(X) \
    X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS) X(IQ4_NL) X(MXFP4) X(Q5_0) X(Q5_1)

/* rows x panels of the kinds in blocks, and the rows that meet blocks as they are, tile by tile, because unpacking for
 * them would cost more. Where dots have no 32 bits, larger tiles spill what they save. */
#if LANES == 16
#define BLOCK_TILES(X, kind)                                                                                       \
    X(kind, 1, 1) X(kind, 2, 1) X(kind, 3, 1) X(kind, 4, 1) X(kind, 5, 1) X(kind, 6, 1) X(kind, 7, 1) X(kind, 8, 1)
enum { BLOCK_MR = 8, BLOCK_ROWS = 16 };
#elif LANES == 8 && !PW_DOT_HALVES
#define BLOCK_TILES(X, kind) X(kind, 1, 1) X(kind, 2, 1) X(kind, 3, 1) X(kind, 4, 1) X(kind, 5, 1) X(kind, 6, 1)
enum { BLOCK_MR = 6, BLOCK_ROWS = 12 };
#else
#define BLOCK_TILES(X, kind) X(kind, 1, 1) X(kind, 2, 1) X(kind, 3, 1) X(kind, 4, 1)
enum { BLOCK_MR = 4, BLOCK_ROWS = LANES == 8 ? 16 : 8 };
#endif

/* Rows that meet blocks as they are. Some kinds gain less by being unpacked than others: nibbles, which a tile of many
 * columns reads at little cost, tables and sub-scales; none gains anything where unpacking is beside dots. */
static int64_t most_block_rows(const pw_weight *w) {
    if (PW_DOT_OPERANDS && pw_core()->unpacks_beside_dots) return 8 * BLOCK_MR;
    int looked_up = pw_block_format_of(w->kind).table != PW_NO_TABLE, nibbles = pw_arithmetic_kind(w->kind) == PW_Q4;
    int gains_less = LANES == 16 ? nibbles : LANES == 8 && (looked_up || pw_has_subs(w->kind));
    return BLOCK_ROWS + (gains_less ? BLOCK_MR : 0);
}

#define TILE(kind, mr, np) \
    static void kind##_##mr##x##np(const tile_call *t) { block_tile(t, PW_##kind, mr, np); }
#define KIND(kind) BLOCK_TILES(TILE, kind)
BLOCK_KINDS(KIND)
#undef KIND
#undef TILE

/* ---- unpacking -------------------------------------------------------------------------------------------------- */

/* Where slots of 32 inputs of one panel go: bytes [8 quads][16][4], or NULL for none; float32 [32 / group][16]: scales,
 * -FLOAT_BIAS times the scales where that is exact, minima where the kind has them. */
typedef struct {
    uint8_t *codes;
    float *scales, *offsets, *mins;
} unpacked_slots;

PW_INLINE void unpack_codes(pw_block_format f, const block_parts *parts, int64_t slot, uint8_t *codes) {
    PW_UNROLL for (int quad = 0; quad < QUADS; ++quad) {
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
            vi_store(codes + quad * VECTOR_ROW_BYTES + v * VECTOR_BYTES, code_quad(f, parts, slot, quad, v));
        }
    }
}

/* Of group `group` of a block, to the first groups of `to`. */
PW_INLINE void unpack_scales(pw_block_format f, const block_parts *parts, const block_tops *tops, int64_t group,
                             const unpacked_slots *to) {
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
        vf scale = group_scale(f, parts, tops, group, v);
        v_store(to->scales + v * LANES, scale);
        if (has_exact_offsets(f)) v_store(to->offsets + v * LANES, v_mul(v_set1(-FLOAT_BIAS), scale));
        if (pw_has_mins(f)) v_store(to->mins + v * LANES, group_min(f, parts, tops, group, v));
    }
}

PW_INLINE void move_on(unpacked_slots *to, int64_t codes, int64_t floats) {
    if (to->codes) to->codes += codes;
    to->scales += floats;
    to->offsets += floats;
    to->mins += floats;
}

/* Slots `slot` to `end` of a panel that begins with this block; lines are asked for `ahead` bytes before they are read. */
typedef void unpack_slots(const uint8_t *block, int64_t slot, int64_t end, int64_t ahead, const unpacked_slots *to);

PW_INLINE void unpack_slots_of(int kind, const uint8_t *block, int64_t slot, int64_t end, int64_t ahead,
                               const unpacked_slots *first) {
    pw_block_format f = pw_block_format_of(kind);
    int64_t slots = f.inputs / PW_K_MULTIPLE, bytes = pw_block_bytes(f);
    int groups = PW_K_MULTIPLE / f.group;
    unpacked_slots to = *first;
    for (block += slot / slots * bytes; slot < end; block += bytes) {
        block_parts parts = parts_of(f, block);
        block_tops tops;
        load_tops(f, &parts, &tops);
        for (int64_t at = 0; ahead && at < bytes; at += VECTOR_ROW_BYTES) ask_for(block + ahead + at, is_far(ahead));
        for (int64_t block_end = at_most(end, (slot / slots + 1) * slots); slot < block_end; ++slot) {
            if (to.codes) unpack_codes(f, &parts, slot % slots, to.codes);
            move_on(&to, PW_K_MULTIPLE * PW_PANEL, 0);
            PW_UNROLL for (int half = 0; half < groups; ++half) {
                unpack_scales(f, &parts, &tops, slot % slots * groups + half, &to);
                move_on(&to, 0, PW_PANEL);
            }
        }
    }
}

#define KIND(kind)                                                                                              \
    static void unpack_##kind(const uint8_t *block, int64_t slot, int64_t end, int64_t ahead, const unpacked_slots *to) { \
        unpack_slots_of(PW_##kind, block, slot, end, ahead, to);                                                \
    }
BLOCK_KINDS(KIND)
#undef KIND

static unpack_slots *const block_unpackers[PW_KINDS] = {
#define KIND(kind) [PW_##kind] = unpack_##kind,
    BLOCK_KINDS(KIND)
#undef KIND
};
