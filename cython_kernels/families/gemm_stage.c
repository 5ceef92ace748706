/* families/gemm_stage.c: unpacks the weights of one pass, once for all rows that meet them; compiled once per ISA.
 *
 * A staged call reads the stage, in L1 or L2, instead of the panels:
 * - bf16 and f16 as float32, one input after the other (exact), or bf16 as float16 (gemm_f16.c);
 * - groups of q8 and q4 with float32 scales and minima, and nibbles as bytes (exact; stages_nibbles);
 * - blocks as such groups (exact);
 * - q8 and q4 as the float32 weights that packing.dequantise gives, s (q - z), then + m, each rounded once; for bf16
 *   paths these rounded once more, to the nearest bf16. The product with them keeps the bound of gemm_dense.h. */
#include "families/gemm_blocks.h"

/* f16, one input after the other. */
static void stage_widened_f16(tile_call *t, uint8_t *bytes) {
    float *to = (float *)(void *)bytes;
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        const uint16_t *from = (const uint16_t *)(const void *)(t->values + panel * t->panel_bytes);
        for (int64_t i = 0; i < t->steps * PW_PANEL; i += LANES, to += LANES) v_store(to, v_load_f16(from + i));
    }
    t->values = bytes;
    t->panel_bytes = t->steps * VECTOR_ROW_BYTES;
}

/* bf16 pairs: twice the steps. */
static void stage_bf16(tile_call *t, uint8_t *bytes) {
    int64_t panel_bytes = t->steps * 2 * VECTOR_ROW_BYTES;
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        const uint8_t *from = t->values + panel * t->panel_bytes;
        uint8_t *to = bytes + panel * panel_bytes;
        for (int64_t i = 0; i < panel_bytes / 2; i += LANES * 4) {
            vi pairs = vi_load(from + i);
            uint8_t *even = to + i / VECTOR_ROW_BYTES * (2 * VECTOR_ROW_BYTES) + i % VECTOR_ROW_BYTES;
            vi_store(even, vi_shl(pairs, 16));
            vi_store(even + VECTOR_ROW_BYTES, vi_and(pairs, vi_set1((int32_t)0xFFFF0000)));
        }
    }
    t->values = bytes;
    t->panel_bytes = panel_bytes;
    t->steps *= 2;
}

#ifdef PW_F16_WORDS
static void stage_f16(tile_call *t, uint8_t *bytes) {
    int64_t panel_bytes = t->steps * VECTOR_ROW_BYTES;
    vi less = vi_set1(f16_fields_less(t->top_exponent) * 0x00800080);
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        const uint8_t *from = t->values + panel * t->panel_bytes;
        uint8_t *to = bytes + panel * panel_bytes;
        for (int64_t i = 0; i < panel_bytes; i += LANES * 4) vi_store(to + i, f16_from_bf16(vi_load(from + i), less));
    }
    t->values = bytes;
    t->panel_bytes = panel_bytes;
}
#endif

/* float16 or float32 [panels][t->steps][16] to float32. */
static void stage_floats(const tile_call *t, const uint8_t *from, float *to) {
    for (int64_t panel = 0; panel < t->panels; ++panel, from += t->panel_scale_bytes) {
        for (int64_t i = 0; i < t->steps * PW_PANEL; i += LANES, to += LANES) {
            const void *p = from + i * t->scale_bytes;
            v_store(to, t->scale_bytes == 2 ? v_load_f16((const uint16_t *)p) : v_load((const float *)p));
        }
    }
}

#if PW_FMA_ROUNDS_ONCE
/* -FLOAT_BIAS times each scale; whether all of them are exact. */
static int stage_offsets(const float *scales, int64_t count, float *offsets) {
    vf bias = v_set1(-FLOAT_BIAS);
    vi rounded = vi_set1(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vf s = v_load(scales + i), offset = v_mul(bias, s);
        v_store(offsets + i, offset);
        rounded = vi_or(rounded, v_bits(v_fma(s, v_set1(FLOAT_BIAS), offset)));
    }
    return vi_max_all(vi_and(rounded, vi_set1(0x7FFFFFFF))) == 0;
}
#else
static int stage_offsets(const float *scales, int64_t count, float *offsets) {
    (void)scales, (void)count, (void)offsets;
    return 0;
}
#endif

/* q4 [panels][t->steps][4][16][4] to what the dots of q8 read as these nibbles, [panels][t->steps][8][16][4]. */
static void stage_nibbles(const tile_call *t, uint8_t *to) {
    vi nibble = vi_set1(0x0F0F0F0F), offset = vi_set1((int32_t)(Q8_WEIGHT_OFFSET * 0x01010101u));
    int64_t vector_rows = t->steps * PW_K_MULTIPLE / pw_inputs_of_row(PW_Q4);
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        const uint8_t *from = t->values + panel * t->panel_bytes;
        for (int64_t i = 0; i < vector_rows; ++i, from += VECTOR_ROW_BYTES, to += 2 * VECTOR_ROW_BYTES) {
            PW_UNROLL for (int v = 0; v < VECTOR_ROW_BYTES; v += LANES * 4) {
                vi pairs = vi_load(from + v);
                vi_store(to + v, vi_or(vi_and(pairs, nibble), offset));
                vi_store(to + VECTOR_ROW_BYTES + v, vi_or(vi_and(vi_shr(pairs, 4), nibble), offset));
            }
        }
    }
}

/* Blocks [panels][t->steps] to groups. Panels are read one after the other. */
static void unpack_blocks(const tile_call *t, const pw_weight *w, unpacked_slots to) {
    pw_block_format f = pw_block_format_of(w->kind);
    int64_t bytes = pw_block_bytes(f), slots = f.inputs / PW_K_MULTIPLE, floats = f.inputs / f.group * PW_PANEL;
    int64_t ahead = t->prefetch_bytes, jump = ahead ? t->panel_bytes - t->steps * bytes : 0;
    int64_t turn = t->steps - at_most(ahead / bytes, t->steps); /* from here on the next panel is what is ahead */
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        const uint8_t *block = t->values + panel * t->panel_bytes, *factors = t->scales + panel * t->panel_scale_bytes;
        for (int half = 0; half < 2; ++half) {
            int64_t begin = half ? turn : 0, count = half ? t->steps - turn : turn;
            ISA(block_unpackers)[w->kind](block + begin * bytes, factors, 0, count * slots, ahead + half * jump, &to);
            move_on(&to, count * f.inputs * PW_PANEL, count * floats);
        }
    }
}

/* The nibbles of blocks as they are, without what is between. */
static void gather_nibbles(const tile_call *t, const pw_weight *w, uint8_t *to) {
    pw_block_format f = pw_block_format_of(w->kind);
    int64_t low_bytes = f.inputs * PW_PANEL / 2;
    for (int64_t i = 0; i < t->panels * t->steps; ++i) {
        const uint8_t *from = t->values + i / t->steps * t->panel_bytes + i % t->steps * pw_block_bytes(f);
        memcpy(to + i * low_bytes, from, (size_t)low_bytes);
    }
}

static void stage_blocks(tile_call *t, const pw_weight *w, uint8_t *bytes) {
    pw_block_format f = pw_block_format_of(w->kind);
    int64_t groups = t->steps * (f.inputs / f.group), floats = t->panels * groups * PW_PANEL;
    float *scales = (float *)(void *)bytes, *offsets = scales + floats, *mins = offsets + floats;
    uint8_t *values = (uint8_t *)(mins + floats);
    int of_nibbles = pw_arithmetic_kind(w->kind) == PW_Q4, nibbles = of_nibbles && !stages_nibbles();
    unpack_blocks(t, w, (unpacked_slots){nibbles ? NULL : values, scales, offsets, mins});
    if (nibbles) gather_nibbles(t, w, values);
    for (int64_t i = 0; of_nibbles && !nibbles && Q8_WEIGHT_OFFSET && i < floats * f.group; ++i) values[i] |= Q8_WEIGHT_OFFSET;
    int exact = has_exact_offsets(f) || stage_offsets(scales, floats, offsets);
    t->scales = (const uint8_t *)scales;
    t->mins = pw_has_mins(f) ? (const uint8_t *)mins : NULL;
    t->offsets = exact ? (const uint8_t *)offsets : NULL;
    t->scale_bytes = sizeof(float);
    t->panel_scale_bytes = groups * PW_PANEL * (int64_t)sizeof(float);
    t->values = values;
    t->steps = groups;
    t->panel_bytes = groups * f.group * PW_PANEL / (nibbles ? 2 : 1);
}

static void stage_groups(tile_call *t, const pw_weight *w, uint8_t *bytes) {
    int64_t floats = t->panels * t->steps * PW_PANEL;
    float *scales = (float *)(void *)bytes, *offsets = scales + floats, *mins = offsets + floats;
    stage_floats(t, t->scales, scales);
    if (t->mins) stage_floats(t, t->mins, mins);
    if (stage_offsets(scales, floats, offsets)) t->offsets = (const uint8_t *)offsets;
    t->scales = (const uint8_t *)scales;
    if (t->mins) t->mins = (const uint8_t *)mins;
    t->scale_bytes = sizeof(float);
    t->panel_scale_bytes = t->steps * PW_PANEL * (int64_t)sizeof(float);
    if (w->kind != PW_Q4 || !stages_nibbles()) return;
    uint8_t *values = (uint8_t *)(mins + floats);
    stage_nibbles(t, values);
    t->values = values;
    t->panel_bytes = t->steps * PW_K_MULTIPLE * PW_PANEL;
}

/* Where weights of q8 or q4 end: float32, pairs of bf16 for dots of two inputs, or of 32. */
typedef enum { WIDEN_TO_F32, WIDEN_TO_PAIRS, WIDEN_TO_BF16 } widening;

/* Byte `byte` of each lane's quad as a weight. */
PW_INLINE vf widened_weight(int kind, vi quads, int byte, vf zero_point, vf scale, vf min, int with_min) {
    if (kind == PW_FP8) return v_mul(e4m3_units(quads, byte), v_mul(scale, v_set1(E4M3_UNIT)));
    vf steps = v_sub(vi_to_vf(vi_and(vi_shr(quads, 8 * byte), vi_set1(255))), zero_point);
    vf weight = v_mul(steps, scale);
    return with_min ? v_add(weight, min) : weight;
}

/* The upper half of each lane, rounded to nearest even; finite. */
PW_INLINE vi rounded_bf16(vf x) {
    vi bits = v_bits(x), odd = vi_and(vi_shr(bits, 16), vi_set1(1));
    return vi_and(vi_add(bits, vi_add(vi_set1(0x7FFF), odd)), vi_set1((int32_t)0xFFFF0000));
}

#ifndef PW_SUBNORMAL_WORDS
PW_INLINE vf v_without_subnormals(vf x) { return x; }
#endif

#ifndef PW_BF16_PAIRS
PW_INLINE vi bf16_pairs(vf even, vf odd) {
    vi upper = rounded_bf16(v_without_subnormals(odd));
    return vi_or(vi_shr(rounded_bf16(v_without_subnormals(even)), 16), upper);
}
#endif

/* One lane vector of one quad of inputs: four float32 vector rows, or two of pairs. */
PW_INLINE void widen_quad(int kind, vi quads, vf zero_point, vf scale, vf min, int with_min, int to_f32, uint8_t *to) {
    PW_UNROLL for (int byte = 0; byte < 4; byte += 2) {
        vf even = widened_weight(kind, quads, byte, zero_point, scale, min, with_min);
        vf odd = widened_weight(kind, quads, byte + 1, zero_point, scale, min, with_min);
        if (to_f32) {
            v_store((float *)(void *)(to + byte * VECTOR_ROW_BYTES), even);
            v_store((float *)(void *)(to + (byte + 1) * VECTOR_ROW_BYTES), odd);
        } else {
            vi_store(to + byte / 2 * VECTOR_ROW_BYTES, bf16_pairs(even, odd));
        }
    }
}

/* What 32 inputs of a panel are unpacked from. */
typedef struct {
    const uint8_t *values, *scales, *mins; /* mins may be NULL */
    int32_t scale_bytes;
} packed_inputs;

PW_INLINE vf scale_lanes(const packed_inputs *p, const uint8_t *from, int64_t group, int lane) {
    const void *at = from + (group * PW_PANEL + lane) * p->scale_bytes;
    return p->scale_bytes == 2 ? v_load_f16((const uint16_t *)at) : v_load((const float *)at);
}

PW_INLINE void widen_inputs(const packed_inputs *p, const pw_weight *w, int to_f32, uint8_t *to) {
    vf zero_point = v_set1((float)w->zero_point);
    int64_t quad_bytes = (to_f32 ? 4 : 2) * VECTOR_ROW_BYTES;
    for (int lane = 0; lane < PW_PANEL; lane += LANES) {
        for (int quad = 0; quad < PW_K_MULTIPLE / 4; ++quad) {
            int64_t group = w->group == 16 ? quad / 4 : 0;
            vf scale = scale_lanes(p, p->scales, group, lane);
            vf min = p->mins ? scale_lanes(p, p->mins, group, lane) : v_zero();
            int vector_row = w->kind == PW_Q4 ? quad / 2 : quad;
            vi quads = vi_load(p->values + vector_row * VECTOR_ROW_BYTES + lane * 4);
            if (w->kind == PW_Q4) quads = vi_and(quad % 2 ? vi_shr(quads, 4) : quads, vi_set1(0x0F0F0F0F));
            widen_quad(w->kind, quads, zero_point, scale, min, p->mins != NULL, to_f32, to + quad * quad_bytes + lane * 4);
        }
    }
}

/* Blocks, t->steps of them. */
static void stage_widened_blocks(tile_call *t, const pw_weight *w, widening to, uint8_t *out, int64_t vector_rows) {
    pw_block_format f = pw_block_format_of(w->kind);
    uint8_t codes[PW_K_MULTIPLE * PW_PANEL] __attribute__((aligned(64)));
    float scales[2 * PW_PANEL], offsets[2 * PW_PANEL], mins[2 * PW_PANEL];
    packed_inputs p = {codes, (const uint8_t *)scales, pw_has_mins(f) ? (const uint8_t *)mins : NULL, sizeof(float)};
    const unpacked_slots here = {codes, scales, offsets, mins};
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        const uint8_t *block = t->values + panel * t->panel_bytes, *factors = t->scales + panel * t->panel_scale_bytes;
        for (int64_t step = 0; step < t->steps; ++step, block += pw_block_bytes(f)) {
            for (int64_t slot = 0; slot < f.inputs / PW_K_MULTIPLE; ++slot, out += vector_rows * VECTOR_ROW_BYTES) {
                ISA(block_unpackers)[w->kind](block, factors, slot, slot + 1, 0, &here);
                widen_inputs(&p, w, to == WIDEN_TO_F32, out);
            }
        }
    }
    t->steps *= f.inputs / PW_K_MULTIPLE;
}

static void stage_widened_groups(tile_call *t, const pw_weight *w, widening to, uint8_t *out, int64_t vector_rows) {
    int64_t values = PW_K_MULTIPLE / pw_inputs_of_row(w->kind) * VECTOR_ROW_BYTES;
    int64_t scales = w->group ? PW_K_MULTIPLE / w->group * PW_PANEL * t->scale_bytes : 0;
    for (int64_t panel = 0; panel < t->panels; ++panel) {
        packed_inputs p = {t->values + panel * t->panel_bytes, t->scales + panel * t->panel_scale_bytes,
                           t->mins ? t->mins + panel * t->panel_scale_bytes : NULL, t->scale_bytes};
        for (int64_t step = 0; step < t->steps; ++step, out += vector_rows * VECTOR_ROW_BYTES) {
            widen_inputs(&p, w, to == WIDEN_TO_F32, out);
            p.values += values;
            p.scales += scales;
            if (p.mins) p.mins += scales;
        }
    }
}

/* t->steps of 32 inputs, or of blocks. */
static void stage_widened(tile_call *t, const pw_weight *w, widening to, uint8_t *bytes) {
    int64_t vector_rows = to == WIDEN_TO_F32 ? PW_K_MULTIPLE : PW_K_MULTIPLE / 2;
    if (pw_in_blocks(w->kind)) stage_widened_blocks(t, w, to, bytes, vector_rows);
    else stage_widened_groups(t, w, to, bytes, vector_rows);
    t->values = bytes;
    t->panel_bytes = t->steps * vector_rows * VECTOR_ROW_BYTES;
    if (to != WIDEN_TO_BF16) t->steps *= vector_rows;
}

void ISA(stage)(arithmetic a, tile_call *t, const pw_weight *w, uint8_t *bytes) {
    switch (a) {
    case BF16_FMA: stage_bf16(t, bytes); break;
    case F16_WIDENED: stage_widened_f16(t, bytes); break;
#ifdef PW_F16_WORDS
    case BF16_AS_F16: stage_f16(t, bytes); break;
#endif
    case QUANT_AS_F32: stage_widened(t, w, WIDEN_TO_F32, bytes); break;
    case QUANT_AS_BF16_DOT: stage_widened(t, w, WIDEN_TO_PAIRS, bytes); break;
    case QUANT_AS_BF16_TILE: stage_widened(t, w, WIDEN_TO_BF16, bytes); break;
    case IN_BLOCKS:
        if (w->kind == PW_FP8) stage_widened(t, w, WIDEN_TO_F32, bytes);
        else stage_blocks(t, w, bytes);
        break;
    case BLOCKWISE: ISA(stage_blockwise)(t, w, bytes, 0); break;
    case BLOCKWISE_TILE: ISA(stage_blockwise)(t, w, bytes, 1); break;
    case Q8_GROUP32:
    case Q8_GROUP16:
    case Q4: stage_groups(t, w, bytes); break;
    default: __builtin_trap(); /* read as they are: gemm.c, staging_pays */
    }
    t->prefetch_bytes = t->prefetch_jump = 0;
}
