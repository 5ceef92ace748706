/* Keys and values into the cache, as its format has them (ops.h). */

PW_INLINE vf saturated(vf x) { return v_min(v_set1(65504.0f), v_max(v_set1(-65504.0f), x)); }

/* One head's key or value of a slot, as it is stored but for the order of a key's elements. */
typedef union {
    float f32[PW_MAX_HEAD_DIM];
    uint32_t words[PW_MAX_HEAD_DIM / PW_KV_CODES_PER_WORD + PW_MAX_HEAD_DIM / PW_KV_GROUP];
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

/* bfloat16 that is not above x, and one that is not below x > 0; in the upper half of the word. */
static uint32_t bf16_below(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits >> 31 ? bits + 0xFFFFu : bits) & 0xFFFF0000u;
}

static uint32_t bf16_above(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0xFFFFu) & 0xFFFF0000u;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

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
    float spread = most - float_of(minimum);
    memset(out, 0, sizeof *out * (size_t)(words + 1));
    if (!finite || !(spread <= 3.4028234664e38f)) minimum = 0x7FC00000u;
    else if (spread >= 0x1p-100f) scale = bf16_above(spread / 15.0f);
    out[0] = minimum | scale >> 16;
    if (!scale) return;
    float factor = 1.0f / float_of(scale);
    for (int32_t i = 0; i < n; ++i) {
        float code = rintf((x[i] - float_of(minimum)) * factor);
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
    float largest = float_of(bits), last[LANES] = {0};
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

/* Returns the scale of int8. */
static float stored(int32_t format, int32_t n, const float *x, stored_row *out) {
    if (format == PW_KV_INT8) return to_int8(n, x, out->bytes);
    if (format == PW_KV_F16) to_f16(n, x, out->half);
    else if (format == PW_KV_BF16)
        for (int32_t i = 0; i < n; ++i) out->half[i] = pw_to_bf16(x[i]);
    else memcpy(out->f32, x, sizeof(float) * (size_t)n);
    return 1.0f;
}

void ISA(store_key)(const pw_kv_head *head, int64_t slot, const float *key) {
    stored_row row;
    if (head->format == PW_KV_INT4) {
        int64_t words = pw_kv_elements(PW_KV_INT4, head->head_dim);
        uint32_t *panel = (uint32_t *)head->keys + slot / PW_PANEL * PW_PANEL * words + slot % PW_PANEL;
        to_int4(head->head_dim, key, head->head_dim, row.words);
        for (int64_t i = 0; i < words; ++i) panel[i * PW_PANEL] = row.words[i];
        return;
    }
    if (head->format == PW_KV_INT16) {
        uint32_t *panel = (uint32_t *)head->keys + slot / PW_PANEL * PW_PANEL * (head->head_dim / 2) + slot % PW_PANEL;
        head->key_scales[slot] = to_int16(head->head_dim, key, pw_key_limit(head->head_dim), row.half);
        for (int32_t i = 0; i < head->head_dim / 2; ++i)
            panel[i * PW_PANEL] = row.half[2 * i] | (uint32_t)row.half[2 * i + 1] << 16;
        return;
    }
    float scale = stored(head->format, head->head_dim, key, &row);
    int64_t at = slot / PW_PANEL * PW_PANEL * head->head_dim + slot % PW_PANEL, n = head->head_dim;
    if (head->key_scales) {
        head->key_scales[slot] = scale;
        for (int64_t i = 0; i < n; ++i) ((int8_t *)head->keys)[at + i * PW_PANEL] = row.bytes[i];
    } else if (head->format == PW_KV_F32) {
        for (int64_t i = 0; i < n; ++i) ((float *)head->keys)[at + i * PW_PANEL] = row.f32[i];
    } else {
        for (int64_t i = 0; i < n; ++i) ((uint16_t *)head->keys)[at + i * PW_PANEL] = row.half[i];
    }
}

static void store_latent(const pw_kv_head *head, int64_t slot, const float *vector) {
    stored_row row;
    int64_t bytes = pw_kv_element_bytes(head->format);
    for (int32_t i = 0; i < head->head_dim; i += PW_MAX_HEAD_DIM) {
        int32_t now = head->head_dim - i < PW_MAX_HEAD_DIM ? head->head_dim - i : PW_MAX_HEAD_DIM;
        stored(head->format, now, vector + i, &row);
        memcpy((char *)head->values + (slot * head->stride + i) * bytes, &row, (size_t)(now * bytes));
    }
}

void ISA(store_value)(const pw_kv_head *head, int64_t slot, const float *value) {
    stored_row row;
    if (head->stride) {
        store_latent(head, slot, value);
        return;
    }
    if (head->format == PW_KV_INT4) {
        int64_t words = pw_kv_elements(PW_KV_INT4, head->value_dim);
        to_int4(head->head_dim, value, head->value_dim, (uint32_t *)head->values + slot * words);
        return;
    }
    if (head->format == PW_KV_INT16) {
        head->value_scales[slot] = to_int16(head->head_dim, value, PW_VALUE_LIMIT, row.half);
        memcpy((uint16_t *)head->values + slot * head->value_dim, row.half, sizeof(uint16_t) * (size_t)head->head_dim);
        return;
    }
    float scale = stored(head->format, head->head_dim, value, &row);
    int64_t bytes = pw_kv_element_bytes(head->format);
    memcpy((char *)head->values + slot * head->value_dim * bytes, &row, (size_t)(head->head_dim * bytes));
    if (head->value_scales) head->value_scales[slot] = scale;
}
