/* families/gemm_blockwise.c: weights in blocks of 256 whose sub-scales apply in integers (path int8_block); compiled
 * once per ISA.
 *
 * Block b of a row holds x ~ a q (a = max|x| / 127 over its 256 inputs), block b of a column w = d s_g (c - z) less
 * d' m_g, with integers s_g and m_g for each group g. Per block, in the order of k:
 *     y += (d D) a,  D = sum over g of s_g (sum c q - z sum q);   then, with minima,   y += (-d' M) a,  M = sum m_g sum q.
 * D and M are exact in int32: at most 256 * 63 * 127 * 128 < 2^28 on the way (q6_k). Of the float part each term rounds at
 * most three times before it is added (D or M; its product with the scale; with a, where there is no FMA), and each of
 * the B blocks adds once, or twice with minima:
 *     |y - exact| <= gamma_(2 B + 3) sum_b (|a d D| + |a d' M|)
 * against the exact y of the quantised x and w. Quantising x itself costs at most a/2 (1 + 2^-14) |w| per input, with one a
 * for 256 inputs, where groups of 32 or 16 have their own (gemm_quant.c).
 *
 * A few rows meet the blocks in registers. For more, a pass stages what integers need: codes as bytes, sub-scales as
 * words; for the tile unit their products. All give the same bits. */
#include "families/gemm_blocks.h"
#include "families/gemm_quant.h"

/* Sums of small codes times bytes that sixteen bits hold, in quads; all of a group where dots have 32 bits. */
PW_INLINE int quads_held(pw_block_format f) {
    int bits = f.low_bits + f.high_bits, quads = f.group / 4;
    int most = f.table ? 1 : 32767 / (2 * 127 * ((1 << bits) - 1));
    return PW_DOT_HALVES && most < quads ? most : quads;
}

/* What stands for zero among the codes as dots read them. */
PW_INLINE int blockwise_zero(pw_block_format f) { return f.zero_point - (f.table ? WIDE_DOT_OFFSET : 0); }

PW_INLINE int blockwise_corrects(pw_block_format f) { return pw_has_mins(f) || blockwise_zero(f); }

/* Bits of a sub-scale's word: the factor of a dot, in both halves of a lane where dots have two. */
PW_INLINE vi sub_word(vi sub) {
    return PW_DOT_HALVES ? vi_or(vi_and(sub, vi_set1(0xFFFF)), vi_shl(sub, 16)) : sub;
}

/* ---- a panel's block, as it is or staged ------------------------------------------------------------------------ */

/* A staged block: codes [64 quads][16][4], words int32 [groups][16], pairs of what is multiplied by sums of two groups
 * [groups / 2][16], scales float32 [16], minima [16]. */
typedef struct {
    const uint8_t *codes, *words, *pairs, *tops;
} staged_block;

PW_INLINE staged_block staged_at(pw_block_format f, const uint8_t *p) {
    const uint8_t *words = p + STAGED_CODES_BYTES, *pairs = words + f.inputs / f.group * VECTOR_ROW_BYTES;
    return (staged_block){p, words, pairs, pairs + f.inputs / f.group / 2 * VECTOR_ROW_BYTES};
}

typedef struct {
    int is_staged;
    block_parts parts;
    staged_block staged;
} panel_block;

PW_INLINE vi sub_scale(pw_block_format f, const panel_block *b, int64_t group, int v) {
    vi sub = vi_load_u8(b->parts.subs + group * PW_PANEL + v * LANES);
    if (f.scaling == PW_SUPER_HALVES) return vi_and(sub, vi_set1(15));
    return f.sub_zero ? vi_sub(sub, vi_set1(f.sub_zero)) : sub;
}

/* What group `group` multiplies the sum of its rows by: its minimum, or else its scale, on behalf of the zero point. */
PW_INLINE vi sub_correction(pw_block_format f, const panel_block *b, int64_t group, int v) {
    if (!pw_has_mins(f)) return sub_scale(f, b, group, v);
    if (f.scaling == PW_SUPER_HALVES) return vi_shr(vi_load_u8(b->parts.subs + group * PW_PANEL + v * LANES), 4);
    return vi_load_u8(b->parts.subs + (f.inputs / f.group + group) * PW_PANEL + v * LANES);
}

PW_INLINE vi blockwise_quad(pw_block_format f, const panel_block *b, int64_t slot, int quad, int v) {
    if (b->is_staged) return vi_load(b->staged.codes + (slot * QUADS + quad) * VECTOR_ROW_BYTES + v * VECTOR_BYTES);
    return code_quad(f, &b->parts, slot, quad, v);
}

PW_INLINE vi blockwise_word(pw_block_format f, const panel_block *b, int64_t group, int v) {
    if (b->is_staged) return vi_load(b->staged.words + group * VECTOR_ROW_BYTES + v * VECTOR_BYTES);
    return sub_word(sub_scale(f, b, group, v));
}

PW_INLINE vi blockwise_pair(pw_block_format f, const panel_block *b, int64_t pair, int v) {
    if (b->is_staged) return vi_load(b->staged.pairs + pair * VECTOR_ROW_BYTES + v * VECTOR_BYTES);
    vi first = sub_correction(f, b, 2 * pair, v), second = sub_correction(f, b, 2 * pair + 1, v);
    return vi_or(vi_and(first, vi_set1(0xFFFF)), vi_shl(second, 16));
}

PW_INLINE void blockwise_tops(pw_block_format f, const panel_block *b, block_tops *out) {
    if (!b->is_staged) {
        load_tops(f, &b->parts, out);
        return;
    }
    const float *tops = (const float *)(const void *)b->staged.tops;
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
        out->scales[v] = v_load(tops + v * LANES);
        if (pw_has_mins(f)) out->mins[v] = v_load(tops + PW_PANEL + v * LANES);
    }
}

/* ---- one block of a tile of one panel ---------------------------------------------------------------------------- */

typedef vi blockwise_sums[BLOCKWISE_MR][VECTORS];

PW_INLINE void blockwise_row(pw_block_format f, vi *dot, const vi *w, const uint8_t *row, int64_t quad) {
    if (PW_DOT_OPERANDS) {
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) dot[v] = dot_at(dot[v], w[v], row + 4 * quad);
        return;
    }
    va4 x = va4_load(row + 4 * quad, 0);
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) dot[v] = f.table ? wide_dot(dot[v], w[v], x) : q4_dot(dot[v], w[v], x);
}

/* total += s_g times the dots of group `half` of a slot. */
PW_INLINE void blockwise_group(pw_block_format f, const panel_block *b, int64_t slot, int half,
                               const uint8_t *const *rows, blockwise_sums total, int mr) {
    int quads = f.group / 4, held = quads_held(f);
    vi word[VECTORS];
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) word[v] = blockwise_word(f, b, slot * (QUADS / quads) + half, v);
    PW_UNROLL for (int first = 0; first < quads; first += held) {
        blockwise_sums dot;
        PW_UNROLL for (int i = 0; i < mr * VECTORS; ++i) dot[i / VECTORS][i % VECTORS] = vi_set1(0);
        PW_UNROLL for (int i = first; i < first + held; ++i) {
            vi w[VECTORS];
            PW_UNROLL for (int v = 0; v < VECTORS; ++v) w[v] = blockwise_quad(f, b, slot, half * quads + i, v);
            PW_UNROLL for (int r = 0; r < mr; ++r) blockwise_row(f, dot[r], w, rows[r], slot * QUADS + half * quads + i);
        }
        PW_UNROLL for (int r = 0; r < mr; ++r) {
            PW_UNROLL for (int v = 0; v < VECTORS; ++v) total[r][v] = add_scaled(total[r][v], dot[r][v], word[v]);
        }
    }
}

PW_INLINE void blockwise_corrections(pw_block_format f, const panel_block *b, const uint8_t *const *rows,
                                     blockwise_sums out, int mr) {
    int pairs = f.inputs / f.group / 2, sums_at = f.group == 16 ? BLOCKWISE_SUMS_AT : BLOCKWISE_SUMS_32_AT;
    PW_UNROLL for (int i = 0; i < mr * VECTORS; ++i) out[i / VECTORS][i % VECTORS] = vi_set1(0);
    if (!blockwise_corrects(f)) return;
    PW_UNROLL for (int p = 0; p < pairs; ++p) {
        vi pair[VECTORS];
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) pair[v] = blockwise_pair(f, b, p, v);
        PW_UNROLL for (int r = 0; r < mr; ++r) {
            vi sums = vi_set1(int_at(rows[r] + sums_at + 4 * p));
            PW_UNROLL for (int v = 0; v < VECTORS; ++v) out[r][v] = pair_dot(out[r][v], pair[v], sums);
        }
    }
}

/* The one float step of a block. */
PW_INLINE void blockwise_finish(pw_block_format f, const panel_block *b, const uint8_t *const *rows,
                                blockwise_sums total, blockwise_sums correction, vf *acc, int mr) {
    block_tops tops;
    blockwise_tops(f, b, &tops);
    PW_UNROLL for (int i = 0; i < mr * VECTORS; ++i) {
        int r = i / VECTORS, v = i % VECTORS;
        vf a = v_set1(float_at(rows[r] + BLOCKWISE_SCALE_AT));
        vi dot = total[r][v];
        if (blockwise_zero(f) == 4) dot = vi_sub(dot, vi_shl(correction[r][v], 2));
        if (blockwise_zero(f) == 32) dot = vi_sub(dot, vi_shl(correction[r][v], 5));
        if (blockwise_zero(f) == 128) dot = vi_sub(dot, vi_shl(correction[r][v], 7));
        acc[i] = v_fma(v_mul(vi_to_vf(dot), tops.scales[v]), a, acc[i]);
        if (pw_has_mins(f)) acc[i] = v_fma(v_mul(vi_to_vf(correction[r][v]), tops.mins[v]), a, acc[i]);
    }
}

PW_INLINE void blockwise_tile(const tile_call *t, int kind, int is_staged, int mr, int np) {
    pw_block_format f = pw_block_format_of(kind);
    int64_t bytes = is_staged ? staged_block_bytes(f) : pw_block_bytes(f), ahead = t->prefetch_bytes;
    int64_t turn = t->steps - ahead / bytes, b = 0;
    const uint8_t *rows[MAX_MR];
    tile_sums acc;
    point_to_blocks(t, rows, mr);
    begin_sums(t, acc, mr, np * VECTORS);
    ask_for_out(t, mr, 1);
    for (int half = 0; half < 2; ++half) {
        for (int64_t end = half ? t->steps : turn; b < end; ++b) {
            const uint8_t *from = t->values + b * bytes;
            panel_block block = {.is_staged = is_staged};
            if (is_staged) block.staged = staged_at(f, from);
            else block.parts = parts_of(f, from, NULL);
            blockwise_sums total, correction;
            PW_UNROLL for (int i = 0; i < mr * VECTORS; ++i) total[i / VECTORS][i % VECTORS] = vi_set1(0);
            for (int64_t slot = 0; slot < f.inputs / PW_K_MULTIPLE; ++slot) {
                if (ahead) prefetch_slot(t, from, f, slot, 1, ahead);
                PW_UNROLL for (int part = 0; part < PW_K_MULTIPLE / f.group; ++part) {
                    blockwise_group(f, &block, slot, part, rows, total, mr);
                }
            }
            blockwise_corrections(f, &block, rows, correction, mr);
            blockwise_finish(f, &block, rows, total, correction, acc, mr);
            if (!ahead) ask_ahead_of_group(&t->next, rows, mr, 1, b);
            advance_blocks(rows, mr, BLOCKWISE_ROW_BYTES);
            __asm__ volatile("" : "+m"(acc)); /* its registers are the integers' meanwhile */
        }
        ahead += ahead ? t->prefetch_jump : 0;
    }
    end_sums(t, acc, mr, np * VECTORS);
}

#ifdef PW_AMX
/* ---- on the tile unit ---------------------------------------------------------------------------------------------
 * A code less the zero point, times its sub-scale, has 16 bits at most (8064 is the largest, of q6_k). It is staged as two
 * planes of bytes, a low one and a signed high one, or as one where it fits. The unit multiplies either by the rows' bytes: the
 * sums are D = low + 256 high, exact. From there on a row is a tile of vectors of its own, of codes whose zero point is 0. */

enum { PLANE_TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES };

typedef int32_t plane_sums[2][MAX_MR][PW_PANEL]; /* low, high */

PW_INLINE pw_block_format without_zero(pw_block_format f) {
    f.zero_point = 0;
    return f;
}

PW_INLINE panel_block planes_at(pw_block_format f, const uint8_t *p) {
    const uint8_t *pairs = p + planes_of(f) * STAGED_CODES_BYTES;
    staged_block staged = {.codes = p, .pairs = pairs, .tops = pairs + f.inputs / f.group / 2 * VECTOR_ROW_BYTES};
    return (panel_block){.is_staged = 1, .staged = staged};
}

PW_INLINE void multiply_planes(const tile_call *t, const uint8_t *rows, const uint8_t *plane, plane_sums out, int two) {
    int lower = t->mr > TILE_ROWS;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t at = 0; at < PW_BLOCK_INPUTS; at += TILE_ROW_BYTES, plane += PLANE_TILE_BYTES) {
        TILE_LOAD(6, plane, TILE_ROW_BYTES);
        if (two) TILE_LOAD(7, plane + STAGED_CODES_BYTES, TILE_ROW_BYTES);
        TILE_LOAD_ONCE(4, rows + at, t->row_bytes);
        TILE_DOT_INT8(0, 4, 6);
        if (two) TILE_DOT_SIGNED(1, 4, 7);
        if (!lower) continue;
        TILE_LOAD_ONCE(5, rows + TILE_ROWS * t->row_bytes + at, t->row_bytes);
        TILE_DOT_INT8(2, 5, 6);
        if (two) TILE_DOT_SIGNED(3, 5, 7);
    }
    TILE_STORE(0, out[0], sizeof out[0][0]);
    if (two) TILE_STORE(1, out[1], sizeof out[1][0]);
    if (!lower) return;
    TILE_STORE(2, out[0][TILE_ROWS], sizeof out[0][0]);
    if (two) TILE_STORE(3, out[1][TILE_ROWS], sizeof out[1][0]);
}

PW_INLINE void finish_planes(pw_block_format f, const uint8_t *block, const tile_call *t, const uint8_t *rows,
                             plane_sums sums, vf *acc) {
    panel_block b = planes_at(f, block);
    for (int r = 0; r < t->mr; ++r, rows += t->row_bytes) {
        blockwise_sums total, correction;
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
            total[0][v] = vi_load(sums[0][r] + v * LANES);
            if (planes_of(f) == 2) total[0][v] = vi_add(total[0][v], vi_shl(vi_load(sums[1][r] + v * LANES), 8));
        }
        blockwise_corrections(without_zero(f), &b, &rows, correction, 1);
        blockwise_finish(without_zero(f), &b, &rows, total, correction, acc + r * VECTORS, 1);
    }
}

/* Up to 32 rows times one panel. Their number is no constant: row by row, not unrolled. */
PW_INLINE void plane_tile(const tile_call *t, int kind) {
    pw_block_format f = pw_block_format_of(kind);
    const uint8_t *rows = t->rows, *block = t->values;
    vf acc[MAX_MR * VECTORS];
    plane_sums sums __attribute__((aligned(64)));
    tiles_begin(t->mr > TILE_ROWS ? TILE_ROWS : t->mr, t->mr > TILE_ROWS ? t->mr - TILE_ROWS : 1);
    for (int r = 0; r < t->mr; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            acc[r * VECTORS + v] = t->partial ? v_load(t->partial + r * t->partial_stride + v * LANES) : v_zero();
        }
        __builtin_prefetch(t->out + r * t->out_stride, 1);
    }
    for (int64_t b = 0; b < t->steps; ++b, rows += BLOCKWISE_ROW_BYTES, block += planes_bytes(f)) {
        multiply_planes(t, rows, block, sums, planes_of(f) == 2);
        finish_planes(f, block, t, rows, sums, acc);
        ask_ahead_of_group(&t->next, NULL, 0, 1, b);
    }
    for (int r = 0; r < t->mr; ++r) {
        float *out = t->out + r * t->out_stride;
        for (int v = 0; v < VECTORS; ++v, out += LANES) {
            vf sum = acc[r * VECTORS + v];
            v_store(out, t->add ? v_add(v_load(out), sum) : sum);
        }
    }
}
#endif

#define BLOCKWISE_KINDS(X) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS)

/* Rows of tiles of one panel: as the blocks are, and staged. Few, because each is compiled for every kind. */
#if LANES == 16
#define BLOCKWISE_TILES(X, of...) PW_ROWS_8(X, 1, of)
#define STAGED_BLOCKWISE_TILES(X, of...) PW_ROWS_2(X, 1, of) X(4, 1, of) X(8, 1, of)
#elif LANES == 8
#define BLOCKWISE_TILES(X, of...) PW_ROWS_4(X, 1, of)
#define STAGED_BLOCKWISE_TILES(X, of...) BLOCKWISE_TILES(X, of)
#else
#define BLOCKWISE_TILES(X, of...) PW_ROWS_2(X, 1, of)
#define STAGED_BLOCKWISE_TILES(X, of...) BLOCKWISE_TILES(X, of) X(4, 1, of)
#endif

#define KIND(kind)                                                       \
    BLOCKWISE_TILES(PW_TILE, blockwise_##kind, blockwise_tile, PW_##kind, 0) \
    STAGED_BLOCKWISE_TILES(PW_TILE, staged_##kind, blockwise_tile, PW_##kind, 1)
BLOCKWISE_KINDS(KIND)
#undef KIND
const tile_table ISA(blockwise_tiles)[PW_KINDS] = {
#define KIND(kind) [PW_##kind] = {BLOCKWISE_TILES(PW_TILE_ENTRY, blockwise_##kind)},
    BLOCKWISE_KINDS(KIND)
#undef KIND
};
const tile_table ISA(staged_blockwise_tiles)[PW_KINDS] = {
#define KIND(kind) [PW_##kind] = {STAGED_BLOCKWISE_TILES(PW_TILE_ENTRY, staged_##kind)},
    BLOCKWISE_KINDS(KIND)
#undef KIND
};
#ifdef PW_AMX
#define KIND(kind) \
    static void planes_##kind(const tile_call *t) { plane_tile(t, PW_##kind); }
BLOCKWISE_KINDS(KIND)
#undef KIND
const tile_table ISA(blockwise_amx_tiles)[PW_KINDS] = {
#define KIND(kind) [PW_##kind] = {[1 ... MAX_MR] = {[1] = planes_##kind}},
    BLOCKWISE_KINDS(KIND)
#undef KIND
};
#else
const tile_table ISA(blockwise_amx_tiles)[PW_KINDS]; /* none */
#endif

/* ---- staging ------------------------------------------------------------------------------------------------------ */

typedef void stage_block(const uint8_t *block, uint8_t *out);

/* Pairs, and behind them the scales of the block. */
PW_INLINE void stage_pairs(pw_block_format f, const panel_block *b, uint8_t *pairs) {
    block_tops tops;
    load_tops(f, &b->parts, &tops);
    float *scales = (float *)(void *)(pairs + f.inputs / f.group / 2 * VECTOR_ROW_BYTES);
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
        for (int64_t p = 0; p < f.inputs / f.group / 2; ++p) {
            vi_store(pairs + p * VECTOR_ROW_BYTES + v * VECTOR_BYTES, blockwise_pair(f, b, p, v));
        }
        v_store(scales + v * LANES, tops.scales[v]);
        if (pw_has_mins(f)) v_store(scales + PW_PANEL + v * LANES, tops.mins[v]);
    }
}

PW_INLINE void stage_block_of(int kind, const uint8_t *from, uint8_t *out) {
    pw_block_format f = pw_block_format_of(kind);
    panel_block b = {.parts = parts_of(f, from, NULL)};
    uint8_t *words = out + STAGED_CODES_BYTES;
    for (int64_t slot = 0; slot < f.inputs / PW_K_MULTIPLE; ++slot) {
        PW_UNROLL for (int i = 0; i < QUADS * VECTORS; ++i) {
            uint8_t *codes = out + (slot * QUADS + i / VECTORS) * VECTOR_ROW_BYTES + i % VECTORS * VECTOR_BYTES;
            vi_store(codes, code_quad(f, &b.parts, slot, i / VECTORS, i % VECTORS));
        }
    }
    PW_UNROLL for (int v = 0; v < VECTORS; ++v) {
        for (int64_t g = 0; g < f.inputs / f.group; ++g) {
            vi_store(words + g * VECTOR_ROW_BYTES + v * VECTOR_BYTES, blockwise_word(f, &b, g, v));
        }
    }
    stage_pairs(f, &b, words + f.inputs / f.group * VECTOR_ROW_BYTES);
}

#define KIND(kind) static void stage_##kind(const uint8_t *from, uint8_t *out) { stage_block_of(PW_##kind, from, out); }
BLOCKWISE_KINDS(KIND)
#undef KIND

static stage_block *const block_stagers[PW_KINDS] = {
#define KIND(kind) [PW_##kind] = stage_##kind,
    BLOCKWISE_KINDS(KIND)
#undef KIND
};

#ifdef PW_AMX
/* A quad's codes times sub-scales: the low bytes, and the high ones to the next plane. */
PW_INLINE void stage_quad(pw_block_format f, vi codes, vi word, uint8_t *low) {
    vi first = vi_set1(0x00FF00FF), second = vi_set1((int32_t)0xFF00FF00), zeros = vi_set1(f.zero_point * 0x00010001);
    vi even = scaled_halves(vi_and(codes, first), zeros, word);
    vi odd = scaled_halves(vi_and(vi_shr(codes, 8), first), zeros, word);
    vi_store(low, vi_or(vi_and(even, first), vi_shl(vi_and(odd, first), 8)));
    if (planes_of(f) == 1) return;
    vi_store(low + STAGED_CODES_BYTES, vi_or(vi_and(vi_shr(even, 8), first), vi_and(odd, second)));
}

PW_INLINE void stage_planes_of(int kind, const uint8_t *from, uint8_t *out) {
    pw_block_format f = pw_block_format_of(kind);
    panel_block b = {.parts = parts_of(f, from, NULL)};
    int quads = f.group / 4;
    for (int64_t slot = 0; slot < f.inputs / PW_K_MULTIPLE; ++slot) {
        PW_UNROLL for (int i = 0; i < QUADS * VECTORS; ++i) {
            int quad = i / VECTORS, v = i % VECTORS;
            vi sub = sub_scale(f, &b, slot * (QUADS / quads) + quad / quads, v);
            vi word = vi_or(vi_and(sub, vi_set1(0xFFFF)), vi_shl(sub, 16));
            uint8_t *low = out + (slot * QUADS + quad) * VECTOR_ROW_BYTES + v * VECTOR_BYTES;
            stage_quad(f, code_quad(f, &b.parts, slot, quad, v), word, low);
        }
    }
    stage_pairs(f, &b, out + planes_of(f) * STAGED_CODES_BYTES);
}

#define KIND(kind) \
    static void stage_planes_##kind(const uint8_t *from, uint8_t *out) { stage_planes_of(PW_##kind, from, out); }
BLOCKWISE_KINDS(KIND)
#undef KIND

static stage_block *const plane_stagers[PW_KINDS] = {
#define KIND(kind) [PW_##kind] = stage_planes_##kind,
    BLOCKWISE_KINDS(KIND)
#undef KIND
};
#else
static stage_block *const plane_stagers[PW_KINDS];
#endif

void ISA(stage_blockwise)(tile_call *t, const pw_weight *w, uint8_t *bytes, int in_planes) {
    pw_block_format f = pw_block_format_of(w->kind);
    int64_t to_bytes = in_planes ? planes_bytes(f) : staged_block_bytes(f);
    stage_block *stage = in_planes ? plane_stagers[w->kind] : block_stagers[w->kind];
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        const uint8_t *from = t->values + panel * t->panel_bytes;
        for (int64_t step = 0; step < t->steps; ++step, from += pw_block_bytes(f)) {
            stage(from, bytes + (panel * t->steps + step) * to_bytes);
        }
    }
    t->values = bytes;
    t->panel_bytes = t->steps * to_bytes;
}
