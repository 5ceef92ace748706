/* families/quantise.c: puts rows of x into the form that GEMM kernels read, and weights back into float32.
 *
 * bf16: round to nearest even, kept as float32 where the path is `fma`. q8, q4 by int8 paths: per group of k (group 0:
 * the whole row; path int8_block: 256), a = max|x| / 127, q = rint(x * (127 / max|x|)): within a/2 (1 + 2^-14) of x. A group whose largest
 * magnitude is below 2^-100 counts as zeros; one that holds an infinity or a NaN gets a = NaN, which every product with
 * it inherits. All ISAs write the same a and q. By dense paths, x itself or its bf16. */
#include "families/byte_scale.h"
#include "families/gemm_blocks.h"
#include "families/gemm_expand.h"
#include "families/gemm_tiles.h"

typedef enum { ROW_F32, ROW_PADDED_F32, ROW_ROUNDED_F32, ROW_F16, ROW_BF16, ROW_GROUPS, ROW_BLOCKS, ROW_BYTES } row_layout;

static row_layout layout_of(const pw_form *form) {
    if (form->group == PW_BLOCK_INPUTS) return ROW_BLOCKS;
    int32_t path = ISA(path_of)(form->kind, form->group, form->path);
    if (form->kind == PW_F32) return ROW_F32;
    if (path == PW_FMA) return form->kind == PW_BF16 ? ROW_ROUNDED_F32 : ROW_PADDED_F32;
    if (path == PW_F16_FMA) return ROW_F16;
    if (path == PW_BF16_DOT || path == PW_BF16_TILE) return ROW_BF16;
    return form->group ? ROW_GROUPS : ROW_BYTES;
}

/* Rows a multiple of 1 KiB apart would compete for a few sets of L1: a line more spreads them. */
static int64_t spread(int64_t row_bytes) { return row_bytes % 1024 ? row_bytes : row_bytes + 64; }

int64_t ISA(row_bytes)(const pw_form *form, int64_t k) {
    int64_t padded = pw_padded_k(k);
    switch (layout_of(form)) {
    case ROW_F32: return spread(4 * k);
    case ROW_PADDED_F32:
    case ROW_ROUNDED_F32: return spread(4 * padded);
    case ROW_F16: return spread(2 * padded + F16_FIELD_BYTES);
    case ROW_BF16: return spread(2 * padded);
    case ROW_GROUPS: return spread(padded / form->group * group_block_bytes(form->kind, form->group));
    case ROW_BLOCKS: return spread(k / PW_BLOCK_INPUTS * BLOCKWISE_ROW_BYTES);
    default: return spread(column_values_bytes(k) + COLUMN_SCALE_BYTES + 4 * (padded / PW_K_MULTIPLE + 1));
    }
}

static void padded_f32_row(int64_t k, const float *x, float *row) {
    memcpy(row, x, 4 * (size_t)k);
    memset(row + k, 0, 4 * (size_t)(pw_padded_k(k) - k));
}

static void rounded_f32_row(int64_t k, const float *x, float *row) {
    for (int64_t i = 0; i < k; ++i) row[i] = pw_from_bf16(pw_to_bf16(x[i]));
    memset(row + k, 0, 4 * (size_t)(pw_padded_k(k) - k));
}

static void bf16_row(int64_t k, const float *x, uint16_t *row) {
    for (int64_t i = 0; i < k; ++i) row[i] = pw_to_bf16(x[i]);
    memset(row + k, 0, 2 * (size_t)(pw_padded_k(k) - k));
}

/* Whether a row's values are read as they were rounded: int8 in the order of k. */
PW_INLINE int plain_values(int kind) { return kind == PW_Q4 || Q8_ACTIVATION_BYTES == 1; }

/* The other form: int16 as (a0, a2), (a1, a3). */
PW_INLINE void widen_values(const int8_t *q, int group, uint8_t *out) {
    int16_t *wide = (int16_t *)(void *)out;
    for (int i = 0; i < group; i += 4) {
        wide[i] = q[i];
        wide[i + 1] = q[i + 2];
        wide[i + 2] = q[i + 1];
        wide[i + 3] = q[i + 3];
    }
}

/* x[count] to the values of a row; their sum. Plain ones are stored where they belong: read back as one vector from a
 * buffer they would wait for its stores to leave the core. */
PW_INLINE int32_t write_values(int kind, int count, const float *x, byte_scale s, uint8_t *out) {
    if (plain_values(kind)) return quantise_values(count, x, s, (int8_t *)out);
    int8_t q[PW_K_MULTIPLE];
    int32_t sum = quantise_values(count, x, s, q);
    widen_values(q, count, out);
    return sum;
}

/* What x[k] has from i on, and zeros up to a whole group. */
PW_INLINE const float *padded_group(int64_t k, const float *x, int64_t i, float *group) {
    memset(group, 0, 4 * PW_K_MULTIPLE);
    if (i < k) memcpy(group, x + i, 4 * (size_t)(k - i));
    return group;
}

/* x[group] to its block. */
PW_INLINE void quantise_group(int kind, int group, int32_t zero_point, const float *x, uint8_t *out) {
    vi magnitude = vi_set1(0);
    for (int i = 0; i < group; i += LANES) magnitude = vi_max(magnitude, magnitudes(x + i));
    byte_scale s = byte_scale_of((uint32_t)vi_max_all(magnitude));
    int32_t sum = write_values(kind, group, x, s, out);
    int32_t bias = FLOAT_BIAS_BITS + ((kind == PW_Q8 ? Q8_WEIGHT_OFFSET : 0) - zero_point) * sum;
    float scaled_sum = s.scale * (float)sum;
    uint8_t *fields = out + group_values_bytes(kind, group);
    memcpy(fields, &s.scale, 4);
    memcpy(fields + 4, &bias, 4);
    memcpy(fields + 8, &scaled_sum, 4);
}

PW_INLINE void quantise_row(int kind, int group, int32_t zero_point, int64_t k, const float *x, uint8_t *out) {
    int64_t i = 0, block_bytes = group_block_bytes(kind, group);
    for (; i + group <= k; i += group, out += block_bytes) quantise_group(kind, group, zero_point, x + i, out);
    for (; i < pw_padded_k(k); i += group, out += block_bytes) {
        float last[PW_K_MULTIPLE];
        quantise_group(kind, group, zero_point, padded_group(k, x, i, last), out);
    }
}

/* x times 2^-exponent to float16, zeros beyond k. */
static void scaled_f16(int64_t k, const float *x, int32_t exponent, uint16_t *out) {
    vf factor = v_set1(pw_bits_to_float((uint32_t)(127 - exponent) << 23));
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) v_store_f16(out + i, v_mul(v_load(x + i), factor));
    for (; i < pw_padded_k(k); i += LANES) {
        int64_t left = k - i;
        v_store_f16(out + i, left > 0 ? v_mul(v_load_n(x + i, (int)left), factor) : v_zero());
    }
}

/* An infinity counts as one of its sign beside zeros. */
static void infinities_f16(int64_t k, const float *x, uint16_t *out) {
    memset(out, 0, 2 * (size_t)pw_padded_k(k));
    for (int64_t i = 0; i < k; ++i) {
        if (isinf(x[i])) out[i] = x[i] > 0 ? 0x3C00 : 0xBC00;
    }
}

/* x[k] to float16 at most 2^2, the exponent that they were divided by, and what else their sums are multiplied by. */
static void f16_row(int64_t k, const float *x, uint8_t *row) {
    uint32_t top_bits = largest_magnitude(k, x), infinity = 0x7F800000u;
    int32_t exponent = (int32_t)(top_bits >> 23) - 127 - F16_ROW_EXPONENT;
    float factor = top_bits < infinity ? 1.0f : top_bits == infinity ? INFINITY : NAN;
    if (exponent < -126 || top_bits >= infinity) exponent = top_bits >= infinity ? 0 : -126;
    if (top_bits < infinity) scaled_f16(k, x, exponent, (uint16_t *)(void *)row);
    else infinities_f16(k, x, (uint16_t *)(void *)row);
    memcpy(row + 2 * pw_padded_k(k), &exponent, 4);
    memcpy(row + 2 * pw_padded_k(k) + 4, &factor, 4);
}

/* x[k] to bytes with one scale (gemm_tiles.h). Sums may wrap: what they are taken from wraps alike. */
static void quantise_column_row(int32_t zero_point, int64_t k, const float *x, uint8_t *out) {
    byte_scale s = byte_scale_of(largest_magnitude(k, x));
    uint8_t *fields = out + column_values_bytes(k);
    uint32_t bias = 0;
    memcpy(fields, &s.scale, 4);
    memcpy(fields + COLUMN_SCALE_BYTES, &bias, 4);
    for (int64_t i = 0; i < k; i += PW_K_MULTIPLE, out += PW_K_MULTIPLE * Q8_ACTIVATION_BYTES) {
        float last[PW_K_MULTIPLE];
        const float *group = i + PW_K_MULTIPLE > k ? padded_group(k, x, i, last) : x + i;
        int32_t sum = write_values(PW_Q8, PW_K_MULTIPLE, group, s, out);
        bias += (uint32_t)(Q8_WEIGHT_OFFSET - zero_point) * (uint32_t)sum;
        memcpy(fields + COLUMN_SCALE_BYTES + 4 * (i / PW_K_MULTIPLE + 1), &bias, 4);
    }
}

/* x[k] to bytes with a scale for every 256, and their sums (gemm_tiles.h). k is whole blocks. */
static void quantise_block_row(int64_t k, const float *x, uint8_t *out) {
    for (int64_t b = 0; b < k; b += PW_BLOCK_INPUTS, x += PW_BLOCK_INPUTS, out += BLOCKWISE_ROW_BYTES) {
        vi magnitude = vi_set1(0);
        for (int i = 0; i < PW_BLOCK_INPUTS; i += LANES) magnitude = vi_max(magnitude, magnitudes(x + i));
        byte_scale s = byte_scale_of((uint32_t)vi_max_all(magnitude));
        int16_t sums[PW_BLOCK_INPUTS / 16], sums_32[PW_BLOCK_INPUTS / 32];
        for (int i = 0; i < PW_BLOCK_INPUTS / 16; ++i) {
            sums[i] = (int16_t)quantise_values(16, x + 16 * i, s, (int8_t *)out + 16 * i);
        }
        for (int i = 0; i < PW_BLOCK_INPUTS / 32; ++i) sums_32[i] = (int16_t)(sums[2 * i] + sums[2 * i + 1]);
        memcpy(out + BLOCKWISE_SUMS_AT, sums, sizeof sums);
        memcpy(out + BLOCKWISE_SUMS_32_AT, sums_32, sizeof sums_32);
        memcpy(out + BLOCKWISE_SCALE_AT, &s.scale, 4);
    }
}

static void prepare_row(const pw_form *form, row_layout layout, int64_t k, const float *x, uint8_t *row) {
    switch (layout) {
    case ROW_F32: memcpy(row, x, 4 * (size_t)k); break;
    case ROW_PADDED_F32: padded_f32_row(k, x, (float *)(void *)row); break;
    case ROW_ROUNDED_F32: rounded_f32_row(k, x, (float *)(void *)row); break;
    case ROW_F16: f16_row(k, x, row); break;
    case ROW_BF16: bf16_row(k, x, (uint16_t *)(void *)row); break;
    case ROW_BLOCKS: quantise_block_row(k, x, row); break;
    case ROW_BYTES: quantise_column_row(form->zero_point, k, x, row); break;
    default:
        if (form->kind == PW_Q4) quantise_row(PW_Q4, 32, form->zero_point, k, x, row);
        else if (form->group == 16) quantise_row(PW_Q8, 16, form->zero_point, k, x, row);
        else quantise_row(PW_Q8, 32, form->zero_point, k, x, row);
    }
}

void ISA(prepare_rows)(const pw_form *form, int64_t k, const float *x, int64_t ldx, pw_range rows, void *prepared) {
    row_layout layout = layout_of(form);
    int64_t row_bytes = ISA(row_bytes)(form, k);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        prepare_row(form, layout, k, x + row * ldx, (uint8_t *)prepared + row * row_bytes);
    }
}

static float scale_at(const void *scales, int32_t scale_bytes, int64_t i) {
    if (scale_bytes == 2) return pw_from_f16(((const uint16_t *)scales)[i]);
    return ((const float *)scales)[i];
}

/* scale * (q - zero_point), then + min: the float32 roundings of packing.dequantise. */
static void unpack_quant_row(const pw_weight *w, int64_t row, float *out) {
    int64_t padded = pw_padded_k(w->k), panel = row / PW_PANEL, column = row % PW_PANEL;
    int64_t group = w->group ? w->group : padded;
    int64_t inputs = pw_inputs_of_row(w->kind);
    const uint8_t *values = (const uint8_t *)w->values + panel * (padded / inputs * VECTOR_ROW_BYTES) + column * 4;
    for (int64_t i = 0; i < w->k; ++i) {
        int64_t at = (panel * (padded / group) + i / group) * PW_PANEL + column;
        uint8_t byte = values[i / inputs * VECTOR_ROW_BYTES + i % 4];
        int32_t q = w->kind == PW_Q8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
        float x = (float)(q - w->zero_point) * scale_at(w->scales, w->scale_bytes, at);
        out[i] = w->mins ? x + scale_at(w->mins, w->scale_bytes, at) : x;
    }
}

/* Of every block the 32 inputs at a time that its panel's sixteen outputs have there. */
static void unpack_block_row(const pw_weight *w, int64_t row, float *out) {
    pw_block_format f = pw_block_format_of(w->kind);
    int64_t panel = row / PW_PANEL, column = row % PW_PANEL, slots = f.inputs / PW_K_MULTIPLE;
    const uint8_t *block = (const uint8_t *)w->values + panel * pw_panel_bytes(w);
    const float *factors = w->scales ? (const float *)w->scales + panel * 2 * PW_PANEL : NULL;
    uint8_t codes[PW_K_MULTIPLE * PW_PANEL];
    float scales[2 * PW_PANEL], offsets[2 * PW_PANEL], mins[2 * PW_PANEL];
    const unpacked_slots to = {codes, scales, offsets, mins};
    for (int64_t first = 0; first < w->k; first += PW_K_MULTIPLE) {
        int64_t slot = first / PW_K_MULTIPLE % slots;
        ISA(block_unpackers)[w->kind](block, factors, slot, slot + 1, 0, &to);
        for (int i = 0; i < PW_K_MULTIPLE; ++i) {
            int at = i / f.group * PW_PANEL + (int)column;
            int32_t code = codes[i / 4 * VECTOR_ROW_BYTES + column * 4 + i % 4];
            float x = (float)(code - f.zero_point);
            if (w->kind == PW_FP8) x = pw_bits_to_float((code & 128u) << 24 | (code & 127u) << 20) * E4M3_UNIT;
            x *= scales[at];
            out[first + i] = pw_has_mins(f) ? x + mins[at] : x;
        }
        if (slot + 1 == slots) block += pw_block_bytes(f);
    }
}

/* One element of a panel, expanded slot by slot. */
static void unpack_sparse_row(const pw_weight *w, int64_t row, float *out) {
    int64_t panel = row / PW_PANEL, column = row % PW_PANEL, groups = w->group ? pw_padded_k(w->k) / w->group : 1;
    sparse_panel from = sparse_panel_of(w, panel, 1, 0);
    uint8_t slot[2 * PW_SLOT_INPUTS * PW_PANEL] __attribute__((aligned(64)));
    int64_t rows = PW_SLOT_INPUTS / pw_inputs_of_row(w->kind), all = pw_padded_k(w->k) / pw_inputs_of_row(w->kind);
    for (int64_t i = 0; i < w->k; ++i) {
        int64_t at = i % PW_SLOT_INPUTS, first = i / PW_SLOT_INPUTS * rows;
        if (at == 0) expand_rows(&from, first, first + rows < all ? rows : all - first, slot);
        if (w->kind == PW_BF16) {
            uint16_t bits;
            memcpy(&bits, slot + at / 2 * VECTOR_ROW_BYTES + 4 * column + 2 * (at % 2), sizeof bits);
            out[i] = pw_from_bf16(bits);
            continue;
        }
        int32_t q = slot[at / 4 * VECTOR_ROW_BYTES + 4 * column + at % 4];
        int64_t scale = (panel * groups + (w->group ? i / w->group : 0)) * PW_PANEL + column;
        float x = (float)(q - w->zero_point) * scale_at(w->scales, w->scale_bytes, scale);
        out[i] = w->mins ? x + scale_at(w->mins, w->scale_bytes, scale) : x;
    }
}

void ISA(unpack_row)(const pw_weight *w, int64_t row, float *out) {
    if (w->offsets) {
        unpack_sparse_row(w, row, out);
        return;
    }
    int64_t padded = pw_padded_k(w->k), first = row / PW_PANEL * padded * PW_PANEL, column = row % PW_PANEL;
    if (w->kind == PW_F32) {
        const float *values = (const float *)w->values + first + column;
        for (int64_t i = 0; i < w->k; ++i) out[i] = values[i * PW_PANEL];
    } else if (w->kind == PW_F16) {
        const uint16_t *values = (const uint16_t *)w->values + first + column;
        for (int64_t i = 0; i < w->k; ++i) out[i] = pw_from_f16(values[i * PW_PANEL]);
    } else if (w->kind == PW_BF16) {
        const uint16_t *values = (const uint16_t *)w->values + first + 2 * column;
        for (int64_t i = 0; i < w->k; ++i) out[i] = pw_from_bf16(values[i / 2 * 2 * PW_PANEL + i % 2]);
    } else if (pw_in_blocks(w->kind)) {
        unpack_block_row(w, row, out);
    } else {
        unpack_quant_row(w, row, out);
    }
}
