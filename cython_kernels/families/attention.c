/* Causal attention of a few query rows over chunks of PW_CHUNK positions of one KV head.
 *
 * Chunk c covers positions [128 c, 128 c + 128) of the sequence, wherever its slots lie. For each row:
 *     s_j = q . k_j                    one chain of multiply-adds over the head's dimensions
 *     top = max s_j,  w_j = exp(s_j - top),  sum = sum w_j,  values = sum w_j v_j  (one chain over j)
 * and chunks are merged in order (merge). Every step of it looks at one row alone and depends on positions only, so
 * a row's result is the same bit for bit whether it comes alone (decode), in a tile (prefill) or in pieces.
 * Positions that a row does not see get weight exactly 0, which changes no sum.
 *
 * Error against float64, with S = max |q| |k| (2-norms), over n positions: each weight is off by a factor
 * 1 + d, |d| <= ((head_dim + 4) S + 4) * 2^-23, hence |error| <= (2 d + (n + 2 n / PW_CHUNK + 4) * 2^-23) * max |v_j|.
 * Keys and values stored as float16 are off by up to 2^-11 of themselves before that, as bfloat16 by 2^-8.
 *
 * int8: a key is scale * c, c integers up to 127, scale = max |k| / 127, and so is a value. The chain runs over c; scores
 * are multiplied by their key's scale and weights, once summed, by their value's. That rounds once more each: head_dim +
 * 5 and n + 1 above, for keys and values as they are stored. Those are off by up to e = 0.5001 scale in every element: a
 * score by d_k = e_k sum |q_i|, the result by (exp(2 max d_k) - 1) max |v_j| + max e_v.
 *
 * int4: 32 numbers are minimum + scale * c, c integers from 0 to 15, computed in float32 by one rounding (scale and
 * minimum are bfloat16: the product is exact); then they are multiplied as float32 storage is, bit for bit. They are
 * off by up to e = 0.5001 scale + 2^-23 max |x|, and scale <= (max x - min x + 2^-7 |min x|) / 15 * (1 + 2^-7),
 * because the minimum is rounded down and the scale up; where that is below 2^-100, scale = 0 and e = 2^-100. */
#include "families/attention_stored.h"

/* Sums of at most 24 registers of 32, or 12 of 16: few rows take more panels at once, so that each score or weight that
 * is broadcast meets more of them. */
#if defined(__AVX512F__)
enum { ATTEND_ROWS = 12, WIDE_ROWS = 6, ATTEND_PANELS = 4, NARROW_PANELS = 2 };
#define FOR_EACH_WIDE(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define FOR_EACH_NARROW(X) X(7) X(8) X(9) X(10) X(11) X(12)
#elif defined(__AVX2__) || defined(PW_NEON)
enum { ATTEND_ROWS = 6, WIDE_ROWS = 0, ATTEND_PANELS = 1, NARROW_PANELS = 1 };
#define FOR_EACH_WIDE(X)
#define FOR_EACH_NARROW(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
enum { ATTEND_ROWS = 2, WIDE_ROWS = 0, ATTEND_PANELS = 1, NARROW_PANELS = 1 };
#define FOR_EACH_WIDE(X)
#define FOR_EACH_NARROW(X) X(1) X(2)
#endif

enum { LEAD = PW_PANEL }; /* floats before a row of scores: a chunk may begin inside a panel */
static const float NOTHING_SEEN = -3.0e38f; /* a maximum below all scores; finite, so that differences are */

typedef struct {
    const void *data;
    int64_t step;       /* elements from one k to the next */
    int64_t panel_step; /* elements from one panel of 16 columns to the next */
    const char *wanted; /* what else to ask for meanwhile, into L2, as much as is read; NULL: nothing */
} matrix;

typedef void (*attend_function)(int64_t steps, const float *a, const matrix *b, float *c, int64_t c_stride);

/* c[r][column] = sum over k of a[r][k] * b[k][column]; rows of a are PW_ROW_STRIDE floats apart. */
PW_INLINE void attend_product(const int rows, const int panels, const int format, int64_t steps, const float *a,
                              const matrix *b, float *c, int64_t c_stride) {
    enum { PER_PANEL = PW_PANEL / LANES };
    const int64_t bytes = pw_kv_element_bytes(format), asked = PW_PANEL * panels * bytes;
    vf sum[ATTEND_ROWS][ATTEND_PANELS * PER_PANEL];
    int64_t step = b->step, panel_step = b->panel_step;
    const char *data = b->data, *wanted = b->wanted;
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) sum[r][v] = v_zero();
    for (int64_t k = 0; k < steps; ++k, data += step * bytes) {
        if (format != PW_KV_F32 && wanted)
            PW_UNROLL for (int64_t line = 0; line < asked; line += 64) __builtin_prefetch(wanted + k * asked + line, 0, 2);
        vf x[ATTEND_PANELS * PER_PANEL];
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v)
            x[v] = v_load_stored(data + (v / PER_PANEL * panel_step + v % PER_PANEL * LANES) * bytes, format);
        PW_UNROLL for (int r = 0; r < rows; ++r) {
            vf factor = v_set1(a[r * PW_ROW_STRIDE + k]);
            PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) sum[r][v] = v_fma(factor, x[v], sum[r][v]);
        }
    }
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) v_store(c + r * c_stride + v * LANES, sum[r][v]);
}

#define ATTEND(ROWS, PANELS, FORMAT)                                                                           \
    static void attend_##ROWS##_##PANELS##_##FORMAT(int64_t steps, const float *a, const matrix *b, float *c,  \
                                                    int64_t c_stride) {                                        \
        attend_product(ROWS, PANELS, PW_KV_##FORMAT, steps, a, b, c, c_stride);                                \
    }
#define ATTEND_FORMATS(ROWS, PANELS) \
    ATTEND(ROWS, PANELS, F32) ATTEND(ROWS, PANELS, F16) ATTEND(ROWS, PANELS, BF16) ATTEND(ROWS, PANELS, INT8)
#define ATTEND_FORMAT_NAMES(ROWS, PANELS)                                                              \
    [(ROWS)-1][(PANELS)-1] = {attend_##ROWS##_##PANELS##_F32, attend_##ROWS##_##PANELS##_F16, \
                              attend_##ROWS##_##PANELS##_BF16, attend_##ROWS##_##PANELS##_INT8},
#if defined(__AVX512F__)
#define NARROW(ROWS) ATTEND_FORMATS(ROWS, 1) ATTEND_FORMATS(ROWS, 2)
#define WIDE(ROWS) NARROW(ROWS) ATTEND_FORMATS(ROWS, 3) ATTEND_FORMATS(ROWS, 4)
#define NARROW_NAMES(ROWS) ATTEND_FORMAT_NAMES(ROWS, 1) ATTEND_FORMAT_NAMES(ROWS, 2)
#define WIDE_NAMES(ROWS) NARROW_NAMES(ROWS) ATTEND_FORMAT_NAMES(ROWS, 3) ATTEND_FORMAT_NAMES(ROWS, 4)
#else
#define NARROW(ROWS) ATTEND_FORMATS(ROWS, 1)
#define NARROW_NAMES(ROWS) ATTEND_FORMAT_NAMES(ROWS, 1)
#endif
FOR_EACH_WIDE(WIDE)
FOR_EACH_NARROW(NARROW)
static const attend_function attend_tiles[ATTEND_ROWS][ATTEND_PANELS][PW_KV_INT8 + 1] = { /* int4 is widened first */
    FOR_EACH_WIDE(WIDE_NAMES) FOR_EACH_NARROW(NARROW_NAMES)};

static void attend_multiply(int rows, int64_t panels, int format, int64_t steps, const float *a, matrix b, float *c,
                            int64_t c_stride) {
    int64_t bytes = pw_kv_element_bytes(format), most = rows <= WIDE_ROWS ? ATTEND_PANELS : NARROW_PANELS;
    for (int64_t done = 0; done < panels;) {
        int now = (int)(panels - done < most ? panels - done : most);
        attend_tiles[rows - 1][now - 1][format](steps, a, &b, c + done * PW_PANEL, c_stride);
        b.data = (const char *)b.data + now * b.panel_step * bytes;
        if (b.wanted) b.wanted += steps * now * PW_PANEL * bytes;
        done += now;
    }
}

/* ---- one tile of rows over one chunk ---------------------------------------------------------------------------- */

/* Positions [begin, end) of a chunk that some row sees, counted from the chunk's start. */
typedef struct {
    int64_t begin, end;
} span;

static const span NOTHING = {PW_CHUNK, 0};

static span seen_by_row(const pw_queries *queries, int row, int64_t chunk) {
    int64_t origin = chunk * PW_CHUNK, begin = queries->first[row] - origin, end = queries->last[row] - origin + 1;
    begin = begin < 0 ? 0 : begin;
    end = end > PW_CHUNK ? PW_CHUNK : end;
    return begin < end ? (span){begin, end} : NOTHING;
}

/* What either sees; nothing is a span that begins at PW_CHUNK and ends at 0. */
static span seen_by_either(span a, span b) {
    return (span){a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

static void fill(float *x, int64_t begin, int64_t end, float value) {
    for (int64_t i = begin; i < end; ++i) x[i] = value;
}

/* The vectors that hold what a row sees; their lanes beyond it become -infinity. */
static span mask_edges(float *scores, span own) {
    span vectors = {own.begin / LANES * LANES, (own.end + LANES - 1) / LANES * LANES};
    fill(scores, vectors.begin, own.begin, -INFINITY);
    fill(scores, own.end, vectors.end, -INFINITY);
    return vectors;
}

/* Scores to weights in place, for what each row sees of `all`; 0 elsewhere in it. Lanes stand for position mod LANES.
 * Three passes over the rows, because within a row every pass waits for the whole of the one before. */
static void weigh(float *scores, const span *own, int rows, span all, float *top, float *sum) {
    span vectors[ATTEND_ROWS];
    vf total[ATTEND_ROWS];
    for (int r = 0; r < rows; ++r) {
        float *row = scores + r * PW_ROW_STRIDE;
        int sees = own[r].begin < own[r].end;
        vectors[r] = sees ? mask_edges(row, own[r]) : (span){all.end, all.end};
        vf maximum = v_set1(NOTHING_SEEN);
        for (int64_t j = vectors[r].begin; j < vectors[r].end; j += LANES) maximum = v_max(maximum, v_load(row + j));
        top[r] = sees ? v_max_all(maximum) : NOTHING_SEEN;
    }
    for (int r = 0; r < rows; ++r) {
        float *row = scores + r * PW_ROW_STRIDE;
        vf shift = v_set1(top[r]);
        total[r] = v_zero();
        for (int64_t j = vectors[r].begin; j < vectors[r].end; j += LANES) {
            vf weight = v_exp(v_sub(v_load(row + j), shift));
            v_store(row + j, weight);
            total[r] = v_add(total[r], weight);
        }
        fill(row, all.begin, vectors[r].begin, 0.0f);
        fill(row, vectors[r].end, all.end, 0.0f);
    }
    for (int r = 0; r < rows; ++r) sum[r] = v_sum(total[r]);
}

/* x[r][i] *= scales[i], for `n` columns of rows of scores. */
static void scale_positions(int rows, int64_t n, const float *scales, float *x) {
    for (int r = 0; r < rows; ++r) {
        float *row = x + r * PW_ROW_STRIDE;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) v_store(row + i, v_mul(v_load(row + i), v_load(scales + i)));
        for (; i < n; ++i) row[i] *= scales[i];
    }
}

/* Where a chunk's keys and values are: the cache itself, or float32 copies that begin at the same slots. */
typedef struct {
    matrix keys, values;     /* the panel of the first slot needed; the row of the first slot needed */
    int64_t first_slot;
    int format;              /* as they lie there; scales are never in it */
} chunk_data;

/* origin: slot of the chunk's first position. */
static void attend_tile(const pw_kv_head *head, const pw_queries *queries, int row, int rows, int64_t chunk,
                        int64_t origin, const chunk_data *data, float *scores, pw_partial out) {
    int64_t bytes = pw_kv_element_bytes(data->format);
    span own[ATTEND_ROWS], all = NOTHING;
    for (int r = 0; r < rows; ++r) all = seen_by_either(all, own[r] = seen_by_row(queries, row + r, chunk));
    matrix keys = data->keys, values = data->values;
    values.data = (const char *)values.data + (origin + all.begin - data->first_slot) * values.step * bytes;
    if (all.begin < all.end) {
        int64_t panel = (origin + all.begin) / PW_PANEL, end_panel = (origin + all.end - 1) / PW_PANEL + 1;
        int64_t panels_before = panel - data->first_slot / PW_PANEL;
        keys.data = (const char *)keys.data + panels_before * keys.panel_step * bytes;
        if (data->format != PW_KV_F32) keys.wanted = values.data;
        float *first = scores + panel * PW_PANEL - origin;
        attend_multiply(rows, end_panel - panel, data->format, head->head_dim,
                        queries->q + (int64_t)row * PW_ROW_STRIDE, keys, first, PW_ROW_STRIDE);
        if (head->key_scales)
            scale_positions(rows, (end_panel - panel) * PW_PANEL, head->key_scales + panel * PW_PANEL, first);
        if (queries->cap > 0)
            for (int r = 0; r < rows; ++r)
                ISA(cap)((end_panel - panel) * PW_PANEL, queries->cap, first + r * PW_ROW_STRIDE, first + r * PW_ROW_STRIDE);
    }
    weigh(scores, own, rows, all, out.top + row, out.sum + row);
    if (head->value_scales)
        scale_positions(rows, all.end - all.begin, head->value_scales + origin + all.begin, scores + all.begin);
    if (data->format != PW_KV_F32) values.wanted = queries->next_keys;
    attend_multiply(rows, head->value_dim / PW_PANEL, data->format, all.end - all.begin, scores + all.begin, values,
                    out.values + (int64_t)row * head->value_dim, head->value_dim);
}

/* ---- chunks ----------------------------------------------------------------------------------------------------- */

#define WIDEN(FORMAT) \
    case PW_KV_##FORMAT: \
        for (int64_t i = 0; i < n; i += LANES, p += LANES * pw_kv_element_bytes(PW_KV_##FORMAT)) \
            v_store(to + i, v_load_stored(p, PW_KV_##FORMAT)); \
        break;
/* n is a multiple of 16 */
static void widen(int format, int64_t n, const void *from, float *to) {
    const char *p = from;
    switch (format) { WIDEN(F16) WIDEN(BF16) WIDEN(INT8) }
}

/* Panels of keys in int4: words of 16 slots side by side. */
static void widen_int4_keys(int64_t panels, int64_t head_dim, const uint32_t *from, float *to) {
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t i = 0; i < head_dim; from += PW_PANEL) {
            int64_t end = i + PW_KV_GROUP < head_dim ? i + PW_KV_GROUP : head_dim;
            const uint32_t *header = from;
            for (; i < end; i += PW_KV_CODES_PER_WORD, to += PW_KV_CODES_PER_WORD * PW_PANEL) {
                from += PW_PANEL;
                for (int64_t lane = 0; lane < PW_PANEL; lane += LANES) {
                    vf scale = v_low_bf16(header + lane), least = v_high_bf16(header + lane);
                    PW_UNROLL for (int code = 0; code < PW_KV_CODES_PER_WORD; ++code)
                        v_store(to + code * PW_PANEL + lane, v_fma(v_codes_of_words(from + lane, code), scale, least));
                }
            }
            to -= (i - end) * PW_PANEL; /* the codes after the last dimension are overwritten by the next panel */
            i = end;
        }
}

/* Rows of values in int4. */
static void widen_int4_values(int64_t slots, int64_t value_dim, const uint32_t *from, float *to) {
    for (int64_t slot = 0; slot < slots; ++slot)
        for (int64_t i = 0; i < value_dim; ) {
            int64_t end = i + PW_KV_GROUP < value_dim ? i + PW_KV_GROUP : value_dim;
            vf scale = v_set1(pw_from_bf16((uint16_t)*from)), least = v_set1(pw_from_bf16((uint16_t)(*from >> 16)));
            for (++from; i < end; i += PW_PANEL, from += PW_PANEL / PW_KV_CODES_PER_WORD, to += PW_PANEL)
                PW_UNROLL for (int first = 0; first < PW_PANEL; first += LANES)
                    v_store(to + first, v_fma(v_codes(from, first), scale, least));
        }
}

/* What is no float32 is converted, once for all tiles of rows that read the chunk. */
static chunk_data widened(const pw_kv_head *head, chunk_data from, int64_t slots, float *keys, float *values) {
    int64_t lead = from.first_slot % PW_PANEL, panels = (lead + slots + PW_PANEL - 1) / PW_PANEL;
    if (from.format == PW_KV_INT4) {
        widen_int4_keys(panels, head->head_dim, from.keys.data, keys);
        widen_int4_values(slots, head->value_dim, from.values.data, values);
    } else {
        widen(from.format, panels * PW_PANEL * head->head_dim, from.keys.data, keys);
        widen(from.format, slots * head->value_dim, from.values.data, values);
    }
    from.keys.data = keys;
    from.values.data = values;
    from.format = PW_KV_F32;
    return from;
}

static void ISA(attend_chunk)(const pw_kv_head *head, const pw_queries *queries, int64_t chunk, int64_t origin,
                              float *scratch, pw_partial out) {
    span all = NOTHING;
    int64_t bytes = pw_kv_element_bytes(head->format);
    for (int row = 0; row < queries->rows; ++row) all = seen_by_either(all, seen_by_row(queries, row, chunk));
    int64_t slot = origin + all.begin, key_bytes = pw_kv_elements(head->format, head->head_dim) * bytes;
    int64_t value_bytes = pw_kv_elements(head->format, head->value_dim) * bytes;
    chunk_data data = {
        .keys = {(const char *)head->keys + slot / PW_PANEL * PW_PANEL * key_bytes, PW_PANEL,
                 (int64_t)PW_PANEL * head->head_dim, NULL},
        .values = {(const char *)head->values + slot * value_bytes, head->value_dim, PW_PANEL, NULL},
        .first_slot = slot,
        .format = head->format,
    };
    float *keys = scratch + ATTEND_ROWS * PW_ROW_STRIDE, *values = keys + (PW_CHUNK + PW_PANEL) * head->head_dim;
    int widens = head->format == PW_KV_INT4 || (head->format != PW_KV_F32 && queries->rows > ATTEND_ROWS);
    if (widens && all.begin < all.end)
        data = widened(head, data, all.end - all.begin, keys, values);
    int most = queries->tile_rows > 0 && queries->tile_rows < ATTEND_ROWS ? queries->tile_rows : ATTEND_ROWS;
    for (int row = 0; row < queries->rows; row += most) {
        int rows = queries->rows - row < most ? queries->rows - row : most;
        attend_tile(head, queries, row, rows, chunk, origin, &data, scratch + LEAD, out);
    }
}

/* What two parts weigh when their maxima differ: top = max, and each part's factor exp(own top - top). */
static void rescale(int rows, pw_partial part, pw_partial into, float *part_factor, float *into_factor) {
    vf old = v_load_n(into.top, rows), new = v_load_n(part.top, rows), top = v_max(old, new);
    vf of_old = v_exp(v_sub(old, top)), of_new = v_exp(v_sub(new, top));
    v_store(into_factor, of_old);
    v_store(part_factor, of_new);
    v_store_n(into.top, top, rows);
    vf sum = v_fma(v_load_n(into.sum, rows), of_old, v_mul(v_load_n(part.sum, rows), of_new));
    v_store_n(into.sum, sum, rows);
}

static void ISA(merge)(int32_t rows, int32_t value_dim, pw_partial part, pw_partial into) {
    for (int32_t row = 0; row < rows; row += LANES) {
        float of_part[LANES], of_into[LANES];
        int now = rows - row < LANES ? rows - row : LANES;
        pw_partial from = {part.top + row, part.sum + row, NULL}, to = {into.top + row, into.sum + row, NULL};
        rescale(now, from, to, of_part, of_into);
        for (int r = 0; r < now; ++r) {
            const float *x = part.values + (int64_t)(row + r) * value_dim;
            float *y = into.values + (int64_t)(row + r) * value_dim;
            for (int32_t i = 0; i < value_dim; i += LANES)
                v_store(y + i, v_fma(v_load(y + i), v_set1(of_into[r]), v_mul(v_load(x + i), v_set1(of_part[r]))));
        }
    }
}

static void ISA(begin)(int32_t rows, int32_t value_dim, pw_partial out) {
    fill(out.top, 0, rows, NOTHING_SEEN);
    fill(out.sum, 0, rows, 0.0f);
    fill(out.values, 0, (int64_t)rows * value_dim, 0.0f);
}

static void ISA(finish)(int32_t head_dim, float sum, const float *values, float *out) {
    vf factor = v_set1(1.0f / sum);
    for (int32_t i = 0; i < head_dim; i += LANES) {
        int count = head_dim - i < LANES ? head_dim - i : LANES;
        v_store_n(out + i, v_mul(v_load_n(values + i, count), factor), count);
    }
}

/* ---- the cache -------------------------------------------------------------------------------------------------- */

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

/* Returns the scale (families/quantise.c: byte_scale_of). */
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

/* Returns the scale of int8. */
static float stored(int32_t format, int32_t n, const float *x, stored_row *out) {
    if (format == PW_KV_INT8) return to_int8(n, x, out->bytes);
    if (format == PW_KV_F16) to_f16(n, x, out->half);
    else if (format == PW_KV_BF16)
        for (int32_t i = 0; i < n; ++i) out->half[i] = pw_to_bf16(x[i]);
    else memcpy(out->f32, x, sizeof(float) * (size_t)n);
    return 1.0f;
}

static void ISA(store_key)(const pw_kv_head *head, int64_t slot, const float *key) {
    stored_row row;
    if (head->format == PW_KV_INT4) {
        int64_t words = pw_kv_elements(PW_KV_INT4, head->head_dim);
        uint32_t *panel = (uint32_t *)head->keys + slot / PW_PANEL * PW_PANEL * words + slot % PW_PANEL;
        to_int4(head->head_dim, key, head->head_dim, row.words);
        for (int64_t i = 0; i < words; ++i) panel[i * PW_PANEL] = row.words[i];
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

static void ISA(store_value)(const pw_kv_head *head, int64_t slot, const float *value) {
    stored_row row;
    if (head->format == PW_KV_INT4) {
        int64_t words = pw_kv_elements(PW_KV_INT4, head->value_dim);
        to_int4(head->head_dim, value, head->value_dim, (uint32_t *)head->values + slot * words);
        return;
    }
    float scale = stored(head->format, head->head_dim, value, &row);
    int64_t bytes = pw_kv_element_bytes(head->format);
    memcpy((char *)head->values + slot * head->value_dim * bytes, &row, (size_t)(head->head_dim * bytes));
    if (head->value_scales) head->value_scales[slot] = scale;
}
