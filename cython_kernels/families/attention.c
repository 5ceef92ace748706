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
 * Keys and values stored as float16 are off by up to 2^-11 of themselves before that. */
#if defined(__AVX512F__)
enum { ATTEND_ROWS = 12, ATTEND_PANELS = 2 }; /* 24 sums, 2 vectors of keys and one of queries: 27 of 32 registers */
#define FOR_EACH_ATTEND(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define ATTEND_OF(ROWS) ATTEND(ROWS, 1, 2) ATTEND(ROWS, 1, 4) ATTEND(ROWS, 2, 2) ATTEND(ROWS, 2, 4)
#define ATTEND_NAMES(ROWS) {{attend_##ROWS##_1_2, attend_##ROWS##_1_4}, {attend_##ROWS##_2_2, attend_##ROWS##_2_4}},
#elif defined(__AVX2__)
enum { ATTEND_ROWS = 6, ATTEND_PANELS = 1 }; /* 12 sums, 2 vectors of keys and one of queries: 15 of 16 registers */
#define FOR_EACH_ATTEND(X) X(1) X(2) X(3) X(4) X(5) X(6)
#elif defined(PW_NEON)
enum { ATTEND_ROWS = 6, ATTEND_PANELS = 1 }; /* 24 sums, 4 vectors of keys and one of queries: 29 of 32 registers */
#define FOR_EACH_ATTEND(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
enum { ATTEND_ROWS = 2, ATTEND_PANELS = 1 };
#define FOR_EACH_ATTEND(X) X(1) X(2)
#endif
#ifndef ATTEND_OF
#define ATTEND_OF(ROWS) ATTEND(ROWS, 1, 2) ATTEND(ROWS, 1, 4)
#define ATTEND_NAMES(ROWS) {{attend_##ROWS##_1_2, attend_##ROWS##_1_4}},
#endif

enum { LEAD = PW_PANEL }; /* floats before a row of scores: a chunk may begin inside a panel */
static const float NOTHING_SEEN = -3.0e38f; /* a maximum below all scores; finite, so that differences are */

typedef struct {
    const void *data;
    int64_t step;       /* elements from one k to the next */
    int64_t panel_step; /* elements from one panel of 16 columns to the next */
    const char *wanted; /* keys in float16: the values of their positions, to be asked for meanwhile; else NULL */
} matrix;

typedef void (*attend_function)(int64_t steps, const float *a, const matrix *b, float *c, int64_t c_stride);

PW_INLINE vf load_element(const char *data, int64_t at, const int bytes) {
    const void *p = data + at * bytes;
    return bytes == 2 ? v_load_f16(p) : v_load(p);
}

/* c[r][column] = sum over k of a[r][k] * b[k][column]; rows of a are PW_ROW_STRIDE floats apart. */
PW_INLINE void attend_product(const int rows, const int panels, const int bytes, int64_t steps, const float *a,
                              const matrix *b, float *c, int64_t c_stride) {
    enum { PER_PANEL = PW_PANEL / LANES };
    vf sum[ATTEND_ROWS][ATTEND_PANELS * PER_PANEL];
    int64_t step = b->step, panel_step = b->panel_step;
    const char *data = b->data, *wanted = b->wanted, *next = data + panels * panel_step * bytes;
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) sum[r][v] = v_zero();
    for (int64_t k = 0; k < steps; ++k, data += step * bytes) {
        if (bytes == 2 && wanted) { /* 32 bytes of the next tile's keys, and as many values, for each panel here */
            __builtin_prefetch(next + k * 32 * panels);
            __builtin_prefetch(wanted + k * 32 * panels);
        }
        vf x[ATTEND_PANELS * PER_PANEL];
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v)
            x[v] = load_element(data, v / PER_PANEL * panel_step + v % PER_PANEL * LANES, bytes);
        PW_UNROLL for (int r = 0; r < rows; ++r) {
            vf factor = v_set1(a[r * PW_ROW_STRIDE + k]);
            PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) sum[r][v] = v_fma(factor, x[v], sum[r][v]);
        }
    }
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) v_store(c + r * c_stride + v * LANES, sum[r][v]);
}

#define ATTEND(ROWS, PANELS, BYTES)                                                                            \
    static void attend_##ROWS##_##PANELS##_##BYTES(int64_t steps, const float *a, const matrix *b, float *c,   \
                                                   int64_t c_stride) {                                         \
        attend_product(ROWS, PANELS, BYTES, steps, a, b, c, c_stride);                                         \
    }
FOR_EACH_ATTEND(ATTEND_OF)
static const attend_function attend_tiles[ATTEND_ROWS][ATTEND_PANELS][2] = {FOR_EACH_ATTEND(ATTEND_NAMES)};

static void attend_multiply(int rows, int64_t panels, int bytes, int64_t steps, const float *a, matrix b, float *c,
                            int64_t c_stride) {
    for (int64_t done = 0; done < panels;) {
        int now = panels - done < ATTEND_PANELS ? (int)(panels - done) : ATTEND_PANELS;
        attend_tiles[rows - 1][now - 1][bytes == 4](steps, a, &b, c + done * PW_PANEL, c_stride);
        b.data = (const char *)b.data + now * b.panel_step * bytes;
        if (b.wanted) b.wanted += now * b.panel_step * bytes;
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

/* Where a chunk's keys and values are: the cache itself, or float32 copies that begin at the same slots. */
typedef struct {
    matrix keys, values;     /* the panel of the first slot needed; the row of the first slot needed */
    int64_t first_slot;
    int bytes;
} chunk_data;

static void attend_tile(const pw_kv_head *head, const pw_queries *queries, int row, int rows, int64_t chunk,
                        const chunk_data *data, float *scores, pw_partial out) {
    span own[ATTEND_ROWS], all = NOTHING;
    for (int r = 0; r < rows; ++r) all = seen_by_either(all, own[r] = seen_by_row(queries, row + r, chunk));
    int64_t origin = queries->slot_base + chunk * PW_CHUNK; /* slot of the chunk's first position */
    matrix keys = data->keys, values = data->values;
    values.data = (const char *)values.data + (origin + all.begin - data->first_slot) * values.step * data->bytes;
    if (all.begin < all.end) {
        int64_t panel = (origin + all.begin) / PW_PANEL, end_panel = (origin + all.end - 1) / PW_PANEL + 1;
        int64_t panels_before = panel - data->first_slot / PW_PANEL;
        keys.data = (const char *)keys.data + panels_before * keys.panel_step * data->bytes;
        keys.wanted = data->bytes == 2 ? values.data : NULL;
        attend_multiply(rows, end_panel - panel, data->bytes, head->head_dim,
                        queries->q + (int64_t)row * PW_ROW_STRIDE, keys, scores + panel * PW_PANEL - origin,
                        PW_ROW_STRIDE);
    }
    weigh(scores, own, rows, all, out.top + row, out.sum + row);
    attend_multiply(rows, head->value_dim / PW_PANEL, data->bytes, all.end - all.begin, scores + all.begin, values,
                    out.values + (int64_t)row * head->value_dim, head->value_dim);
}

/* ---- chunks ----------------------------------------------------------------------------------------------------- */

static void widen(int64_t n, const uint16_t *from, float *to) { /* n is a multiple of 16 */
    for (int64_t i = 0; i < n; i += LANES) v_store(to + i, v_load_f16(from + i));
}

/* Several tiles of rows read a chunk: its float16 is converted once. */
static chunk_data widened(const pw_kv_head *head, chunk_data from, int64_t slots, float *keys, float *values) {
    int64_t lead = from.first_slot % PW_PANEL, panels = (lead + slots + PW_PANEL - 1) / PW_PANEL;
    widen(panels * PW_PANEL * head->head_dim, from.keys.data, keys);
    widen(slots * head->value_dim, from.values.data, values);
    from.keys.data = keys;
    from.values.data = values;
    from.bytes = 4;
    return from;
}

static void ISA(attend_chunk)(const pw_kv_head *head, const pw_queries *queries, int64_t chunk, float *scratch,
                              pw_partial out) {
    span all = NOTHING;
    for (int row = 0; row < queries->rows; ++row) all = seen_by_either(all, seen_by_row(queries, row, chunk));
    int64_t slot = queries->slot_base + chunk * PW_CHUNK + all.begin;
    chunk_data data = {
        .keys = {(const char *)head->keys + slot / PW_PANEL * PW_PANEL * head->head_dim * head->bytes, PW_PANEL,
                 (int64_t)PW_PANEL * head->head_dim, NULL},
        .values = {(const char *)head->values + slot * head->value_dim * head->bytes, head->value_dim, PW_PANEL,
                   NULL},
        .first_slot = slot,
        .bytes = head->bytes,
    };
    float *keys = scratch + ATTEND_ROWS * PW_ROW_STRIDE, *values = keys + (PW_CHUNK + PW_PANEL) * head->head_dim;
    if (head->bytes == 2 && queries->rows > ATTEND_ROWS && all.begin < all.end)
        data = widened(head, data, all.end - all.begin, keys, values);
    int most = queries->tile_rows > 0 && queries->tile_rows < ATTEND_ROWS ? queries->tile_rows : ATTEND_ROWS;
    for (int row = 0; row < queries->rows; row += most) {
        int rows = queries->rows - row < most ? queries->rows - row : most;
        attend_tile(head, queries, row, rows, chunk, &data, scratch + LEAD, out);
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

/* head_dim values as stored; at most LANES - 1 more are written to `out`. */
static void to_half(int32_t n, const float *x, uint16_t *out) {
    for (int32_t i = 0; i < n; i += LANES)
        v_store_f16(out + i, saturated(v_load_n(x + i, n - i < LANES ? n - i : LANES)));
}

static void ISA(store_key)(const pw_kv_head *head, int64_t slot, const float *key) {
    int64_t at = slot / PW_PANEL * PW_PANEL * head->head_dim + slot % PW_PANEL;
    if (head->bytes == 4) {
        for (int32_t i = 0; i < head->head_dim; ++i) ((float *)head->keys)[at + (int64_t)i * PW_PANEL] = key[i];
        return;
    }
    uint16_t half[PW_MAX_HEAD_DIM + LANES];
    to_half(head->head_dim, key, half);
    for (int32_t i = 0; i < head->head_dim; ++i) ((uint16_t *)head->keys)[at + (int64_t)i * PW_PANEL] = half[i];
}

static void ISA(store_value)(const pw_kv_head *head, int64_t slot, const float *value) {
    if (head->bytes == 4) {
        memcpy((float *)head->values + slot * head->value_dim, value, sizeof(float) * (size_t)head->head_dim);
        return;
    }
    uint16_t half[PW_MAX_HEAD_DIM + LANES];
    to_half(head->head_dim, value, half);
    memcpy((uint16_t *)head->values + slot * head->value_dim, half, sizeof(uint16_t) * (size_t)head->head_dim);
}
