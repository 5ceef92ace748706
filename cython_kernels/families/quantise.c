/* families/quantise.c: puts rows of x into the form that GEMM kernels read, and weights back into float32.
 *
 * bf16: round to nearest even; as float32 for the path `fma`. q8, q4: per group of k, a = max|x| / 127, q = rint(x * (127 / max|x|)): within
 * a/2 (1 + 2^-14) of x. A group whose largest magnitude is below 2^-100 counts as zeros; one that holds an infinity
 * or a NaN gets a = NaN, which every product with it inherits. All ISAs write the same a and q. */
#include "families/gemm.h"

int32_t ISA(path_of)(int32_t kind, int32_t path);

PW_INLINE int64_t bf16_activation_bytes(int32_t path) { return ISA(path_of)(PW_BF16, path) == PW_FMA ? 4 : 2; }

/* Rows a multiple of 1 KiB apart would compete for a few sets of L1: a line more spreads them. */
static int64_t spread(int64_t row_bytes) { return row_bytes % 1024 ? row_bytes : row_bytes + 64; }

int64_t ISA(row_bytes)(const pw_form *form, int64_t k) {
    if (form->kind == PW_F32) return spread(4 * k);
    if (form->kind == PW_BF16) return spread(pw_padded_k(k) * bf16_activation_bytes(form->path));
    return spread(pw_padded_k(k) / form->group * group_block_bytes(form->kind, form->group));
}

static void bf16_row(int64_t k, const float *x, uint16_t *row) {
    for (int64_t i = 0; i < k; ++i) row[i] = pw_to_bf16(x[i]);
    memset(row + k, 0, 2 * (size_t)(pw_padded_k(k) - k));
}

static void widened_bf16_row(int64_t k, const float *x, float *row) {
    for (int64_t i = 0; i < k; ++i) row[i] = pw_from_bf16(pw_to_bf16(x[i]));
    memset(row + k, 0, 4 * (size_t)(pw_padded_k(k) - k));
}

/* int8 in the order of k, or int16 as (a0, a2), (a1, a3) where the dots want them so. */
PW_INLINE void write_values(int kind, const int8_t *q, int group, uint8_t *out) {
    if (kind == PW_Q4 || Q8_ACTIVATION_BYTES == 1) {
        memcpy(out, q, (size_t)group);
        return;
    }
    int16_t *wide = (int16_t *)(void *)out;
    for (int i = 0; i < group; i += 4) {
        wide[i] = q[i];
        wide[i + 1] = q[i + 2];
        wide[i + 2] = q[i + 1];
        wide[i + 3] = q[i + 3];
    }
}

/* x[group] to its block. */
PW_INLINE void quantise_group(int kind, int group, int32_t zero_point, const float *x, uint8_t *out) {
    int8_t q[PW_K_MULTIPLE];
    vi magnitude = vi_set1(0), total = vi_set1(0);
    for (int i = 0; i < group; i += LANES) {
        magnitude = vi_max(magnitude, vi_and(v_bits(v_load(x + i)), vi_set1(0x7FFFFFFF)));
    }
    /* Compared as integers, magnitudes order as floats do, with infinity and NaN on top. */
    uint32_t top_bits = (uint32_t)vi_max_all(magnitude);
    float top = pw_bits_to_float(top_bits), scale = top / 127.0f, inverse = 127.0f / top;
    int finite = top_bits < 0x7F800000u, usable = finite && top >= 0x1p-100f;
    if (!usable) scale = finite ? 0.0f : NAN;
    for (int i = 0; i < group; i += LANES) {
        vi rounded = usable ? v_round(v_mul(v_load(x + i), v_set1(inverse))) : vi_set1(0);
        total = vi_add(total, rounded);
        vi_store_i8(q + i, rounded);
    }
    int32_t sum = vi_sum(total), bias = ((kind == PW_Q8 ? Q8_WEIGHT_OFFSET : 0) - zero_point) * sum;
    float scaled_sum = scale * (float)sum;
    write_values(kind, q, group, out);
    uint8_t *fields = out + group_values_bytes(kind, group);
    memcpy(fields, &scale, 4);
    memcpy(fields + 4, &bias, 4);
    memcpy(fields + 8, &scaled_sum, 4);
}

PW_INLINE void quantise_row(int kind, int group, int32_t zero_point, int64_t k, const float *x, uint8_t *out) {
    int64_t i = 0, block_bytes = group_block_bytes(kind, group);
    for (; i + group <= k; i += group, out += block_bytes) quantise_group(kind, group, zero_point, x + i, out);
    for (; i < pw_padded_k(k); i += group, out += block_bytes) {
        float last[PW_K_MULTIPLE] = {0};
        if (i < k) memcpy(last, x + i, 4 * (size_t)(k - i));
        quantise_group(kind, group, zero_point, last, out);
    }
}

void ISA(prepare_rows)(const pw_form *form, int64_t k, const float *x, int64_t ldx, pw_range rows, void *prepared) {
    int64_t row_bytes = ISA(row_bytes)(form, k);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float *from = x + row * ldx;
        uint8_t *to = (uint8_t *)prepared + row * row_bytes;
        if (form->kind == PW_F32) memcpy(to, from, 4 * (size_t)k);
        else if (form->kind == PW_BF16 && bf16_activation_bytes(form->path) == 4) widened_bf16_row(k, from, (float *)(void *)to);
        else if (form->kind == PW_BF16) bf16_row(k, from, (uint16_t *)(void *)to);
        else if (form->kind == PW_Q4) quantise_row(PW_Q4, 32, form->zero_point, k, from, to);
        else if (form->group == 16) quantise_row(PW_Q8, 16, form->zero_point, k, from, to);
        else quantise_row(PW_Q8, 32, form->zero_point, k, from, to);
    }
}

static float scale_at(const void *scales, int32_t scale_bytes, int64_t i) {
    if (scale_bytes == 2) return pw_from_f16(((const uint16_t *)scales)[i]);
    return ((const float *)scales)[i];
}

/* scale * (q - zero_point), then + min: the float32 roundings of packing.dequantise. */
static void unpack_quant_row(const pw_weight *w, int64_t row, float *out) {
    int64_t padded = pw_padded_k(w->k), panel = row / PW_PANEL, column = row % PW_PANEL;
    int64_t inputs = inputs_per_vector_row(w->kind);
    const uint8_t *values = (const uint8_t *)w->values + panel * (padded / inputs * VECTOR_ROW_BYTES) + column * 4;
    for (int64_t i = 0; i < w->k; ++i) {
        int64_t at = (panel * (padded / w->group) + i / w->group) * PW_PANEL + column;
        uint8_t byte = values[i / inputs * VECTOR_ROW_BYTES + i % 4];
        int32_t q = w->kind == PW_Q8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
        float x = (float)(q - w->zero_point) * scale_at(w->scales, w->scale_bytes, at);
        out[i] = w->mins ? x + scale_at(w->mins, w->scale_bytes, at) : x;
    }
}

void ISA(unpack_row)(const pw_weight *w, int64_t row, float *out) {
    int64_t padded = pw_padded_k(w->k), first = row / PW_PANEL * padded * PW_PANEL, column = row % PW_PANEL;
    if (w->kind == PW_F32) {
        const float *values = (const float *)w->values + first + column;
        for (int64_t i = 0; i < w->k; ++i) out[i] = values[i * PW_PANEL];
    } else if (w->kind == PW_BF16) {
        const uint16_t *values = (const uint16_t *)w->values + first + 2 * column;
        for (int64_t i = 0; i < w->k; ++i) out[i] = pw_from_bf16(values[i / 2 * 2 * PW_PANEL + i % 2]);
    } else {
        unpack_quant_row(w, row, out);
    }
}
