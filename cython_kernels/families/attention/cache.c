/* Keys and values into the cache, as its format has them (ops.h). */

PW_INLINE vf saturated(vf x) { return v_min(v_set1(65504.0f), v_max(v_set1(-65504.0f), x)); }

/* One head's key or value of a slot, as it is stored but for the order of a key's elements. */
typedef union {
    float f32[PW_MAX_HEAD_DIM];
    uint32_t words[PW_MAX_HEAD_DIM / 2]; /* of int16; int4 has fewer */
    uint16_t half[PW_MAX_HEAD_DIM + LANES];
    int8_t bytes[PW_MAX_HEAD_DIM + LANES];
} stored_row;

static void to_f16(int32_t n, const float *x, uint16_t *out) {
    for (int32_t i = 0; i < n; i += LANES)
        v_store_f16(out + i, saturated(v_load_n(x + i, n - i < LANES ? n - i : LANES)));
}

/* Returns the scale (families/byte_scale.h). */
static float to_int8(int32_t n, const float *x, int8_t *out) {
    float last[LANES] = {0};
    int32_t whole = n / LANES * LANES;
    memcpy(last, x + whole, sizeof(float) * (size_t)(n - whole));
    byte_scale s = byte_scale_of(largest_magnitude(n, x));
    quantise_values(whole, x, s, out);
    quantise_values(LANES, last, s, out + whole);
    return s.scale;
}

/* bfloat16 that is not below x > 0, and one that is not above x; in the upper half of the word. */
static uint32_t bf16_above(float x) { return (pw_float_to_bits(x) + 0xFFFFu) & 0xFFFF0000u; }
static uint32_t bf16_below(float x) { return pw_float_to_bits(x) >> 31 ? bf16_above(x) : pw_float_to_bits(x) & 0xFFFF0000u; }

/* Up to 32 numbers as a header and `words` words of codes. */
static void to_int4_group(int32_t n, const float *x, int32_t words, uint32_t *out) {
    float least = x[0], most = x[0];
    int finite = 1;
    for (int32_t i = 0; i < n; ++i) {
        finite &= fabsf(x[i]) <= 3.4028234664e38f;
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    uint32_t minimum = bf16_below(least), scale = 0;
    float spread = most - pw_bits_to_float(minimum);
    memset(out, 0, sizeof *out * (size_t)(words + 1));
    if (!finite || !(spread <= 3.4028234664e38f)) minimum = 0x7FC00000u;
    else if (spread >= 0x1p-100f) scale = bf16_above(spread / 15.0f);
    out[0] = minimum | scale >> 16;
    if (!scale) return;
    float factor = 1.0f / pw_bits_to_float(scale);
    for (int32_t i = 0; i < n; ++i) {
        float code = rintf((x[i] - pw_bits_to_float(minimum)) * factor);
        out[1 + i / PW_KV_CODES_PER_WORD] |= (uint32_t)(code > 15 ? 15 : code) << 4 * (i % PW_KV_CODES_PER_WORD);
    }
}

/* codes: how many are kept, n and as many zeros as make values end with a panel. */
static void to_int4(int32_t n, const float *x, int32_t codes, uint32_t *out) {
    for (int32_t i = 0; i < n; i += PW_KV_GROUP) {
        int32_t now = n - i < PW_KV_GROUP ? n - i : PW_KV_GROUP, kept = codes - i < PW_KV_GROUP ? codes - i : PW_KV_GROUP;
        int32_t words = (kept + PW_KV_CODES_PER_WORD - 1) / PW_KV_CODES_PER_WORD;
        to_int4_group(now, x + i, words, out);
        out += words + 1;
    }
}

/* Returns the scale: `most` of it are the largest magnitude; NaN where that is not finite. */
static float to_int16(int32_t n, const float *x, float most, uint16_t *out) {
    uint32_t bits = largest_magnitude(n, x);
    float largest = pw_bits_to_float(bits), last[LANES] = {0};
    if (bits >= 0x7F800000u) {
        memset(out, 0, sizeof *out * (size_t)n);
        return NAN;
    }
    largest = largest < PW_KV_LEAST ? PW_KV_LEAST : largest;
    vf factor = v_set1(most / largest);
    int32_t words[LANES];
    for (int32_t i = 0; i < n; i += LANES) {
        int count = n - i < LANES ? n - i : LANES;
        v_store(last, v_load_n(x + i, count));
        vi_store(words, v_round(v_mul(v_load(last), factor)));
        for (int lane = 0; lane < count; ++lane) out[i + lane] = (uint16_t)words[lane];
    }
    return largest / most;
}

/* Returns the scale, where the format has one. kept: of int4, how many codes (to_int4); most: of int16. */
static float stored(int32_t format, int32_t n, const float *x, int32_t kept, float most, stored_row *out) {
    switch (format) {
    case PW_KV_INT8: return to_int8(n, x, out->bytes);
    case PW_KV_INT16: return to_int16(n, x, most, out->half);
    case PW_KV_INT4: to_int4(n, x, kept, out->words); break;
    case PW_KV_F16: to_f16(n, x, out->half); break;
    case PW_KV_BF16:
        for (int32_t i = 0; i < n; ++i) out->half[i] = pw_to_bf16(x[i]);
        break;
    default: memcpy(out->f32, x, sizeof(float) * (size_t)n);
    }
    return 1.0f;
}

#define SPREAD(TYPE, FIELD) \
    for (int64_t i = 0; i < elements; ++i) ((TYPE *)head->keys)[at + i * PW_PANEL] = row.FIELD[i]
void ISA(store_key)(const pw_kv_head *head, int64_t slot, const float *key) {
    stored_row row;
    int64_t elements = pw_key_elements(head), at = slot / PW_PANEL * PW_PANEL * elements + slot % PW_PANEL;
    float most = head->format == PW_KV_INT16 ? pw_key_limit(head->head_dim) : 0.0f;
    float scale = stored(head->format, head->head_dim, key, head->head_dim, most, &row);
    if (head->key_scales) head->key_scales[slot] = scale;
    if (head->format == PW_KV_F32) SPREAD(float, f32);
    else if (head->format == PW_KV_INT8) SPREAD(int8_t, bytes);
    else if (pw_kv_element_bytes(head->format) == 2) SPREAD(uint16_t, half);
    else SPREAD(uint32_t, words);
}

static void store_latent(const pw_kv_head *head, int64_t slot, const float *vector) {
    stored_row row;
    int64_t bytes = pw_kv_element_bytes(head->format);
    for (int32_t i = 0; i < head->head_dim; i += PW_MAX_HEAD_DIM) {
        int32_t now = head->head_dim - i < PW_MAX_HEAD_DIM ? head->head_dim - i : PW_MAX_HEAD_DIM;
        stored(head->format, now, vector + i, now, 0.0f, &row);
        memcpy((char *)head->values + (slot * head->stride + i) * bytes, &row, (size_t)(now * bytes));
    }
}

void ISA(store_value)(const pw_kv_head *head, int64_t slot, const float *value) {
    stored_row row;
    if (head->stride) {
        store_latent(head, slot, value);
        return;
    }
    float scale = stored(head->format, head->head_dim, value, head->value_dim, PW_VALUE_LIMIT, &row);
    int64_t bytes = pw_kv_element_bytes(head->format), each = pw_value_elements(head) * bytes;
    int32_t written = head->format == PW_KV_INT4 ? head->value_dim : head->head_dim;
    memcpy((char *)head->values + slot * each, &row, (size_t)(pw_kv_elements(head->format, written) * bytes));
    if (head->value_scales) head->value_scales[slot] = scale;
}
