/* families/gemm_blocks.c: weights in blocks (blocks.h), read as they are or unpacked; compiled once per ISA.
 *
 * Their arithmetic is that of gemm_quant.c, and so is the bound. A group's scale is the product of a float16 of 11 bits
 * and an integer of at most 8, which float32 holds exactly, as it does FLOAT_BIAS times that; so is its minimum. Rows that
 * one tile has meet the blocks by way of registers; for more, gemm_stage.c unpacks them once. Both give the same bits. */
#include "families/gemm_blocks.h"
#include "families/gemm_quant.h"

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

/* acc = fma(x, w, acc) for 32 inputs one after the other, w being a number in e4m3 times its scale, rounded: the products of
 * float32 weights, and the bound of gemm_dense.h. Scales are below 2^7 (blocks.py). */
PW_INLINE void float_slot(vf *acc, const tile_blocks *blocks, int64_t slot, const uint8_t **rows, int mr, int np) {
    for (int i = 0; i < PW_K_MULTIPLE; i += 4) {
        PW_UNROLL for (int c = 0; c < np * VECTORS; ++c) {
            int p = c / VECTORS, v = c % VECTORS;
            vi codes = code_quad(pw_block_format_of(PW_FP8), &blocks->parts[p], slot, i / 4, v);
            PW_UNROLL for (int byte = 0; byte < 4; ++byte) {
                vf w = v_mul(e4m3_units(codes, byte), v_mul(blocks->tops[p].scales[v], v_set1(E4M3_UNIT)));
                PW_UNROLL for (int r = 0; r < mr; ++r) {
                    vf x = v_set1(float_at(rows[r] + 4 * (i + byte)));
                    acc[r * np * VECTORS + c] = v_fma_in_place(x, w, acc[r * np * VECTORS + c]);
                }
            }
        }
    }
}

/* acc += a (s D), then += (a sum q) m, for group `half` of 32 inputs. */
PW_INLINE void block_group(const tile_call *t, vf *acc, int kind, const tile_blocks *blocks, int64_t slot, int half,
                           const uint8_t **rows, int mr, int np) {
    if (kind == PW_FP8) {
        float_slot(acc, blocks, slot, rows, mr, np);
        return;
    }
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
                blocks.parts[p] = parts_of(f, first + p * t->panel_bytes, t->scales + p * t->panel_scale_bytes);
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

#define KIND(kind, ...) BLOCK_TILES(PW_TILE, kind, block_tile, PW_##kind)
PW_BLOCK_FORMATS(KIND)
#undef KIND
PW_TILE(1, 4, FP8, block_tile, PW_FP8) /* one panel's chains would wait for each other */
PW_TILE(2, 4, FP8, block_tile, PW_FP8)
const tile_table ISA(block_tiles)[PW_KINDS] = {
#define KIND(kind, ...) [PW_##kind] = {BLOCK_TILES(PW_TILE_ENTRY, kind)},
    PW_BLOCK_FORMATS(KIND)
    [PW_FP8][1][4] = FP8_1x4, [PW_FP8][2][4] = FP8_2x4,
#undef KIND
};

/* ---- unpacking -------------------------------------------------------------------------------------------------- */

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

PW_INLINE void unpack_slots_of(int kind, const uint8_t *block, const void *factors, int64_t slot, int64_t end,
                               int64_t ahead, const unpacked_slots *first) {
    pw_block_format f = pw_block_format_of(kind);
    int64_t slots = f.inputs / PW_K_MULTIPLE, bytes = pw_block_bytes(f);
    int groups = PW_K_MULTIPLE / f.group;
    unpacked_slots to = *first;
    for (block += slot / slots * bytes; slot < end; block += bytes) {
        block_parts parts = parts_of(f, block, factors);
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

#define KIND(kind, ...)                                                                                            \
    static void unpack_##kind(const uint8_t *block, const void *factors, int64_t slot, int64_t end, int64_t ahead, \
                              const unpacked_slots *to) {                                                          \
        unpack_slots_of(PW_##kind, block, factors, slot, end, ahead, to);                                          \
    }
PW_BLOCK_FORMATS(KIND)
#undef KIND

unpack_slots *const ISA(block_unpackers)[PW_KINDS] = {
#define KIND(kind, ...) [PW_##kind] = unpack_##kind,
    PW_BLOCK_FORMATS(KIND)
#undef KIND
};
