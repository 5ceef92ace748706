/* Attention over keys and values of int16 and int8 by exact products of int16 (attention/pairs.h).
 *
 * Of a query row a unit is |q| / QUERY_NORM (2-norm), of a key and a value the scale that is stored with it; queries are
 * rounded to whole units here, keys and values were when they were stored. A score is their product, exact in int32
 * (pw_key_limit), times both units. Weights, times their values' units, are rounded to whole units of their own: the
 * largest possible in the chunk has 32,767 of them, and all together at most so many that their sum with values fits
 * (weight_sum).
 *
 * Error against float64 over keys and values as they are stored: what attention.c says of float32 with head_dim + 10 in
 * place of head_dim + 4; a score by d_q = 0.501 |q| sum |k_i| / QUERY_NORM more, the result hence by (exp(2 max d_q) - 1)
 * max |v_j|; and by the weights' rounding, 0.501 PW_CHUNK / 32,767 max |v_j|. That is the worst, of a chunk in which one
 * weight is nearly all; roundings of both signs, as they are found, leave a hundredth of it. Each step looks at one row,
 * and at what it sees, alone. */

static const float QUERY_NORM = PW_KV_QUERY_NORM, WEIGHT_MOST = 32767.0f, LEAST_WEIGHT = 0x1p-120f;
enum { FACTOR_AT = PW_ROW_STRIDE - 1 }; /* where a row of prepared queries has its unit */

/* Rows of queries in place: int16 where floats were, and the unit. */
static void round_queries(int32_t head_dim, int32_t rows, float *q) {
    for (int32_t r = 0; r < rows; ++r, q += PW_ROW_STRIDE) {
        vf most = v_zero();
        sixteen squares = no_sums();
        for (int32_t i = 0; i < head_dim; i += LANES) {
            vf x = v_load_n(q + i, head_dim - i < LANES ? head_dim - i : LANES);
            most = v_max(v_max(most, v_sub(v_zero(), x)), x);
        }
        float largest = v_max_all(most), scale = 1.0f / (largest > PW_KV_LEAST ? largest : PW_KV_LEAST);
        for (int32_t i = 0; i < head_dim; i += SIXTEEN)
            PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
                int count = of_part(head_dim - i, part);
                if (!count) continue;
                vf x = v_mul(v_load_n(q + i + part * LANES, count), v_set1(scale));
                squares.part[part] = v_fma(x, x, squares.part[part]);
            }
        float norm = sqrtf(sum_of_sixteen(squares)); /* 1 to 16, or of a row of nothing less */
        norm = norm < 1.0f ? 1.0f : norm;
        vf units = v_set1(QUERY_NORM / norm * scale);
        for (int32_t i = 0; i < head_dim; i += LANES) {
            vf x = v_load_n(q + i, head_dim - i < LANES ? head_dim - i : LANES);
            store_words((int16_t *)(void *)q + i, v_round(v_mul(x, units)));
        }
        q[FACTOR_AT] = norm / (QUERY_NORM * scale);
    }
}

/* A chunk as pairs of int16: keys in panels [panel][pair of dimensions][16], values [pair of positions][value_dim]. */
typedef struct {
    const int32_t *keys; /* the panel of the first slot needed */
    int32_t *values;
    const float *key_units; /* by slot, from that panel on */
    float *value_units;     /* by position in the chunk */
    int64_t first_panel;
    float most_units;       /* of all weights of a row */
    float least_unit;       /* of the weights of a row that sees all */
    span seen;              /* by any row */
    const char *wanted;     /* after the keys */
} pair_chunk;

/* Asks for a line of what is wanted beside what is read: `at` counts bytes of both. */
PW_INLINE void ask_with(const char *wanted, int64_t at) {
    if (wanted) __builtin_prefetch(wanted + at, 0, 2);
}

static void widen_byte_keys(const int8_t *from, int64_t pairs, const char *wanted, int32_t *to) {
    for (int64_t i = 0; i < pairs; ++i, from += 2 * PW_PANEL, to += PW_PANEL) {
        if (i % 2 == 0) ask_with(wanted, i * 2 * PW_PANEL);
        PW_UNROLL for (int lane = 0; lane < PW_PANEL; lane += LANES)
            vi_store(to + lane, paired(words_of_bytes(from + lane), words_of_bytes(from + PW_PANEL + lane)));
    }
}

/* Units of a vector of values; 0 where a row does not see them. */
PW_INLINE vf seen_units(const float *units, int64_t j, span own) {
    if (own.begin <= j && j + LANES <= own.end) return v_load(units + j);
    float seen[LANES] = {0};
    for (int64_t i = j < own.begin ? own.begin : j; i < j + LANES && i < own.end; ++i) seen[i - j] = units[i];
    return v_load(seen);
}

/* The largest unit of a value that a row sees; NaN is skipped. */
static float largest_unit(const float *units, span own) {
    vf most = v_zero();
    for (int64_t j = own.begin / LANES * LANES; j < own.end; j += LANES) most = v_max(seen_units(units, j, own), most);
    return v_max_all(most);
}

/* Values of the pairs of positions of which some are seen, in a chunk whose slots begin at `origin`. What lies after the
 * last is never read: its weight is 0, so that its partner may stand for it. wanted: what to ask for meanwhile. */
static void pair_values(const pw_kv_head *head, int64_t origin, const char *wanted, pair_chunk *out) {
    span seen = out->seen;
    int64_t dim = head->value_dim, bytes = head->format == PW_KV_INT8 ? 1 : 2, begin = seen.begin / 2 * 2;
    for (int64_t p = begin; p < seen.end; p += 2) {
        const char *low = (const char *)head->values + (origin + p) * dim * bytes;
        const char *high = p + 1 < seen.end ? low + dim * bytes : low;
        int32_t *to = out->values + p / 2 * dim;
        for (int64_t at = 0; at < 2 * dim * bytes; at += 64) ask_with(wanted, (p - begin) * dim * bytes + at);
        if (bytes == 2) pair_rows((const int16_t *)(const void *)low, (const int16_t *)(const void *)high, dim, to);
        else
            for (int64_t i = 0; i < dim; i += LANES)
                vi_store(to + i, paired(words_of_bytes((const int8_t *)low + i), words_of_bytes((const int8_t *)high + i)));
    }
    memcpy(out->value_units + begin, head->value_scales + origin + begin, sizeof(float) * (size_t)(seen.end - begin));
    if (seen.begin == 0 && seen.end == PW_CHUNK) out->least_unit = largest_unit(out->value_units, seen) / WEIGHT_MOST;
}

/* ---- products --------------------------------------------------------------------------------------------------- */

typedef struct {
    const int32_t *data;
    int64_t step, panel_step; /* as in matrix, in pairs */
    const char *wanted;
} pair_matrix;

typedef void (*pair_function)(int64_t steps, const char *a, const pair_matrix *b, const float *factors, float *c,
                              int64_t c_stride);

/* c[r][column] = factor * sum over pairs k of a[r][k] . b[k][column]; factors of columns, or of rows. Rows of a are
 * PW_ROW_STRIDE floats apart. */
PW_INLINE void pair_product(const int rows, const int panels, const int of_columns, int64_t steps, const char *a,
                            const pair_matrix *b, const float *factors, float *c, int64_t c_stride) {
    enum { PER_PANEL = PW_PANEL / LANES };
    vi sum[ATTEND_ROWS][ATTEND_PANELS * PER_PANEL];
    int64_t step = b->step, panel_step = b->panel_step;
    const int32_t *data = b->data;
    const char *wanted = b->wanted;
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) sum[r][v] = vi_set1(0);
    for (int64_t k = 0; k < steps; ++k, data += step) {
        if (of_columns)
            PW_UNROLL for (int panel = 0; panel < panels; ++panel) ask_with(wanted, (k * panels + panel) * PW_PANEL * 4);
        vi x[ATTEND_PANELS * PER_PANEL];
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v)
            x[v] = vi_load(data + v / PER_PANEL * panel_step + v % PER_PANEL * LANES);
        part_pairs(x, panels * PER_PANEL);
        PW_UNROLL for (int r = 0; r < rows; ++r) {
            int32_t pair;
            memcpy(&pair, a + (r * PW_ROW_STRIDE + k) * 4, sizeof pair);
            panel_dots(sum[r], x, pair, panels * PER_PANEL);
        }
    }
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) {
            vf factor = of_columns ? v_load(factors + v * LANES) : v_set1(factors[r]);
            v_store(c + r * c_stride + v * LANES, v_mul(vi_to_vf(sum[r][v]), factor));
        }
}

#define PAIRS(ROWS, PANELS)                                                                                             \
    static void pairs_##ROWS##_##PANELS##_columns(int64_t steps, const char *a, const pair_matrix *b,                   \
                                                  const float *factors, float *c, int64_t c_stride) {                   \
        pair_product(ROWS, PANELS, 1, steps, a, b, factors, c, c_stride);                                               \
    }                                                                                                                   \
    static void pairs_##ROWS##_##PANELS##_rows(int64_t steps, const char *a, const pair_matrix *b,                      \
                                               const float *factors, float *c, int64_t c_stride) {                      \
        pair_product(ROWS, PANELS, 0, steps, a, b, factors, c, c_stride);                                               \
    }
#define PAIR_NAMES(ROWS, PANELS) [(ROWS)-1][(PANELS)-1] = {pairs_##ROWS##_##PANELS##_rows, pairs_##ROWS##_##PANELS##_columns},
EACH_TILE(PAIRS)
static const pair_function pair_tiles[ATTEND_ROWS][ATTEND_PANELS][2] = {EACH_TILE(PAIR_NAMES)};

static void pair_multiply(int rows, int64_t panels, int of_columns, int64_t steps, const char *a, pair_matrix b,
                          const float *factors, float *c, int64_t c_stride) {
    int64_t most = rows <= WIDE_ROWS ? ATTEND_PANELS : NARROW_PANELS;
    for (int64_t done = 0; done < panels;) {
        int now = (int)(panels - done < most ? panels - done : most);
        pair_tiles[rows - 1][now - 1][of_columns](steps, a, &b, factors + (of_columns ? done * PW_PANEL : 0),
                                                  c + done * PW_PANEL, c_stride);
        b.data += now * b.panel_step;
        if (b.wanted) b.wanted += steps * now * PW_PANEL * 4;
        done += now;
    }
}

/* ---- one tile of rows over one chunk ---------------------------------------------------------------------------- */

/* Scores of a row in `vectors`, whole sixteens, to weights times their values' units. whole: `own`, what it sees, is all. */
PW_INLINE void weigh_row(const int whole, float *row, span vectors, span own, float top, float factor,
                         const float *value_units, sixteen *sum, sixteen *scaled_sum) {
    vf by = v_set1(LOG2_E * factor), shift = v_set1(top);
    sixteen sums = no_sums(), scaled_sums = no_sums();
    for (int64_t j = vectors.begin; j < vectors.end; j += SIXTEEN)
        PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
            int64_t at = j + part * LANES;
            vf weight = v_exp2(v_mul(v_sub(v_load(row + at), shift), by));
            vf with_unit = v_mul(weight, whole ? v_load(value_units + at) : seen_units(value_units, at, own));
            v_store(row + at, with_unit);
            sums.part[part] = v_add(sums.part[part], weight);
            scaled_sums.part[part] = v_add(scaled_sums.part[part], with_unit);
        }
    *sum = sums;
    *scaled_sum = scaled_sums;
}

/* A row of weights times their values' units to int16, in place, for what it sees of `all`; 0 elsewhere in it. */
static void round_weights(float *row, span vectors, span all, vf per_unit) {
    int16_t *words = (int16_t *)(void *)row;
    int64_t j = vectors.begin, begin = all.begin / 2 * 2, end = (all.end + 1) / 2 * 2;
    for (; j + 2 * LANES <= vectors.end; j += 2 * LANES)
        store_two_words(words + j, v_round(v_mul(v_load(row + j), per_unit)),
                        v_round(v_mul(v_load(row + j + LANES), per_unit)));
    for (; j < vectors.end; j += LANES) store_words(words + j, v_round(v_mul(v_load(row + j), per_unit)));
    for (j = begin; j < vectors.begin; ++j) words[j] = 0;
    for (j = vectors.end > begin ? vectors.end : begin; j < end; ++j) words[j] = 0;
}

/* Scores to weights in int16, in place: factors[r] is what a score of the row is multiplied by. A row of int16 begins
 * where its scores do. Of each row: top, sum, and the unit of its weights times values. What takes sums and divisions is
 * done for all rows at once, so that none waits for its own. */
static void weigh_pairs(float *scores, const span *own, int rows, span all, const float *factors, const pair_chunk *data,
                        pw_partial out, float *units) {
    const float *value_units = data->value_units;
    span vectors[ATTEND_ROWS];
    sixteen total[ATTEND_ROWS], scaled[ATTEND_ROWS];
    float scaled_sums[ATTEND_ROWS], least[ATTEND_ROWS], per_unit[ATTEND_ROWS];
    find_tops(scores, own, rows, vectors, out.top);
    for (int r = 0; r < rows; ++r) {
        float *row = scores + r * PW_ROW_STRIDE;
        if (own[r].begin == 0 && own[r].end == PW_CHUNK) {
            weigh_row(1, row, (span){0, PW_CHUNK}, own[r], out.top[r], factors[r], value_units, &total[r], &scaled[r]);
            least[r] = data->least_unit;
        } else {
            weigh_row(0, row, vectors[r], own[r], out.top[r], factors[r], value_units, &total[r], &scaled[r]);
            least[r] = largest_unit(value_units, own[r]) / WEIGHT_MOST;
        }
        if (own[r].begin < own[r].end) out.top[r] *= factors[r];
    }
    sums_of(rows, scaled, scaled_sums);
    for (int r = 0; r < rows; ++r) {
        float unit = scaled_sums[r] / data->most_units;
        unit = least[r] > unit ? least[r] : unit;
        units[r] = unit < LEAST_WEIGHT ? LEAST_WEIGHT : unit; /* NaN stays */
        per_unit[r] = 1.0f / units[r];
    }
    sums_of(rows, total, out.sum);
    for (int r = 0; r < rows; ++r)
        round_weights(scores + r * PW_ROW_STRIDE, vectors[r], all, v_set1(per_unit[r]));
}

/* queries as round_queries leaves them; the chunk's first position lies in slot `origin`. The first tile pairs the values,
 * which are asked for while it reads keys. */
static void attend_tile_pairs(const pw_kv_head *head, const pw_queries *queries, int row, int rows, int64_t chunk,
                              int64_t origin, pair_chunk *data, float *scores, pw_partial out) {
    span own[ATTEND_ROWS] = {{0, 0}}, all = NOTHING;
    float factors[ATTEND_ROWS], units[ATTEND_ROWS];
    const float *q = queries->q + (int64_t)row * PW_ROW_STRIDE;
    for (int r = 0; r < rows; ++r) {
        all = seen_by_either(all, own[r] = seen_by_row(queries, row + r, chunk));
        factors[r] = q[r * PW_ROW_STRIDE + FACTOR_AT];
    }
    if (all.begin < all.end) {
        int64_t panel = (origin + all.begin) / PW_PANEL, panels = (origin + all.end - 1) / PW_PANEL + 1 - panel;
        int64_t pairs = head->head_dim / 2, before = panel - data->first_panel;
        pair_matrix keys = {data->keys + before * pairs * PW_PANEL, PW_PANEL, pairs * PW_PANEL, row == 0 ? data->wanted : NULL};
        float *first = scores + panel * PW_PANEL - origin;
        pair_multiply(rows, panels, 1, pairs, (const char *)q, keys, data->key_units + before * PW_PANEL, first, PW_ROW_STRIDE);
        for (int r = 0; r < rows && (queries->cap > 0 || queries->slopes); ++r) {
            float *scored = first + r * PW_ROW_STRIDE;
            ISA(scale)(panels * PW_PANEL, factors[r], scored);
            if (queries->cap > 0) ISA(cap)(panels * PW_PANEL, queries->cap, scored, scored);
            if (queries->slopes) lower_by_distance(queries, row + r, own[r], chunk, scores + r * PW_ROW_STRIDE);
            factors[r] = 1.0f;
        }
    }
    if (row == 0 && data->seen.begin < data->seen.end) pair_values(head, origin, queries->next_keys, data);
    pw_partial sums = {out.top + row, out.sum + row, NULL};
    weigh_pairs(scores, own, rows, all, factors, data, sums, units);
    pair_matrix values = {data->values + all.begin / 2 * head->value_dim, head->value_dim, PW_PANEL, NULL};
    int64_t pairs = all.begin < all.end ? (all.end + 1) / 2 - all.begin / 2 : 0;
    pair_multiply(rows, head->value_dim / PW_PANEL, 0, pairs, (const char *)((int16_t *)(void *)scores + all.begin / 2 * 2),
                  values, units, out.values + (int64_t)row * head->value_dim, head->value_dim);
}

/* Units that the weights of a chunk have together: this and 64 of roundings times the largest value is below 2^31. */
static float weight_sum(int32_t format) { return format == PW_KV_INT8 ? 127.0f * WEIGHT_MOST : 262000.0f; }

/* attend_chunk over what `all` rows see. */
static void attend_chunk_pairs(const pw_kv_head *head, const pw_queries *queries, int most, span all, int64_t chunk,
                               int64_t origin, float *scratch, pw_partial out) {
    int32_t *keys = (int32_t *)(void *)(scratch + PW_TILE_ROWS * PW_ROW_STRIDE);
    int32_t *values = keys + (PW_CHUNK + PW_PANEL) * head->head_dim / 2;
    int64_t panel = (origin + all.begin) / PW_PANEL, pairs = head->head_dim / 2;
    int64_t value_bytes = pw_kv_elements(head->format, head->value_dim) * pw_kv_element_bytes(head->format);
    pair_chunk data = {
        .keys = keys,
        .values = values,
        .value_units = (float *)(void *)(values + PW_CHUNK / 2 * head->value_dim),
        .first_panel = panel,
        .most_units = weight_sum(head->format),
        .seen = all,
    };
    if (all.begin < all.end) {
        int64_t panels = (origin + all.end - 1) / PW_PANEL + 1 - panel;
        const char *wanted = (const char *)head->values + (origin + all.begin) * value_bytes;
        data.key_units = head->key_scales + panel * PW_PANEL;
        for (int64_t i = 0; i < panels; ++i) { /* scales are read late, and in few lines */
            ask_with((const char *)data.key_units, i * 64);
            ask_with((const char *)(head->value_scales + origin + all.begin), i * 64);
        }
        if (head->format == PW_KV_INT16) {
            data.keys = (const int32_t *)head->keys + panel * pairs * PW_PANEL;
            data.wanted = wanted;
        } else {
            widen_byte_keys((const int8_t *)head->keys + panel * PW_PANEL * head->head_dim, panels * pairs, wanted, keys);
        }
    }
    for (int row = 0; row < queries->rows; row += most) {
        int rows = queries->rows - row < most ? queries->rows - row : most;
        attend_tile_pairs(head, queries, row, rows, chunk, origin, &data, scratch + LEAD, out);
    }
}
