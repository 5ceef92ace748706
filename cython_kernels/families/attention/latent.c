/* Attention over latent vectors: of each position one vector of head_dim numbers, the key of every query head, whose first
 * value_dim numbers are the value. Vectors of a chunk become float32 once, for scores and values of all rows.
 *
 * Sixteen query rows share a vector register, and each number of a key meets them all: a score is the same chain of
 * multiply-adds over the dimensions as where keys lie in panels, and the bound is that of attention.c. */

#define LATENT(ROWS, PANELS)                                                                                            \
    static void latent_##ROWS##_##PANELS(int64_t steps, const float *a, const matrix *b, float *c, int64_t c_stride) {  \
        attend_product(ROWS, PANELS, PW_KV_F32, PW_LATENT_STRIDE, steps, a, b, c, c_stride);                            \
    }
#define LATENT_NAMES(ROWS, PANELS) [(ROWS)-1][(PANELS)-1] = latent_##ROWS##_##PANELS,
#if defined(__AVX512F__)
#define LATENT_NARROW(ROWS) LATENT(ROWS, 1) LATENT(ROWS, 2)
#define LATENT_WIDE(ROWS) LATENT_NARROW(ROWS) LATENT(ROWS, 3) LATENT(ROWS, 4)
#define LATENT_NAMES_NARROW(ROWS) LATENT_NAMES(ROWS, 1) LATENT_NAMES(ROWS, 2)
#define LATENT_NAMES_WIDE(ROWS) LATENT_NAMES_NARROW(ROWS) LATENT_NAMES(ROWS, 3) LATENT_NAMES(ROWS, 4)
#else
#define LATENT_NARROW(ROWS) LATENT(ROWS, 1)
#define LATENT_NAMES_NARROW(ROWS) LATENT_NAMES(ROWS, 1)
#endif
FOR_EACH_WIDE(LATENT_WIDE)
FOR_EACH_NARROW(LATENT_NARROW)
static const attend_function latent_tiles[ATTEND_ROWS][ATTEND_PANELS] = {FOR_EACH_WIDE(LATENT_NAMES_WIDE)
                                                                             FOR_EACH_NARROW(LATENT_NAMES_NARROW)};

/* Products of up to ATTEND_ROWS vectors with the queries of all rows, sixteen of these to a panel. */
static void latent_multiply(int vectors, int64_t panels, int64_t steps, const float *a, matrix q, float *c, int64_t c_stride) {
    int64_t most = vectors <= WIDE_ROWS ? ATTEND_PANELS : NARROW_PANELS;
    for (int64_t done = 0; done < panels;) {
        int64_t now = panels - done < most ? panels - done : most;
        latent_tiles[vectors - 1][now - 1](steps, a, &q, c + done * PW_PANEL, c_stride);
        q.data = (const float *)q.data + now * q.panel_step;
        done += now;
    }
}

#define TAKE_LATENT(FORMAT)                                                                 \
    case PW_KV_##FORMAT:                                                                    \
        for (; i + LANES <= dim; i += LANES)                                                \
            v_store(to + i, v_load_stored(from + i * pw_kv_element_bytes(PW_KV_##FORMAT), PW_KV_##FORMAT)); \
        break;
/* One stored vector as float32; what is left of it after whole registers number by number. */
static void take_latent(int format, int64_t dim, const char *from, float *to) {
    int64_t i = 0;
    switch (format) { TAKE_LATENT(F32) TAKE_LATENT(F16) TAKE_LATENT(BF16) }
    if (i == dim) return;
    char rest[LANES * sizeof(float)] = {0};
    float last[LANES];
    int64_t bytes = pw_kv_element_bytes(format);
    memcpy(rest, from + i * bytes, (size_t)((dim - i) * bytes));
    take_latent(format, LANES, rest, last);
    memcpy(to + i, last, sizeof(float) * (size_t)(dim - i));
}

/* What a chunk is to all tiles of rows. */
typedef struct {
    const float *vectors;  /* [position][PW_LATENT_STRIDE] */
    const float *products; /* [position][padded]: scores by position, then query row */
    int64_t padded;
} latent_chunk;

/* Products of the vectors [all.begin, all.end) of a chunk, or of the chosen ones, with the queries of all rows. */
static latent_chunk multiply_chunk(const pw_kv_head *head, const pw_queries *queries, span all, int64_t chunk, int64_t origin,
                                   float *scratch) {
    int64_t padded = (queries->rows + PW_PANEL - 1) / PW_PANEL * PW_PANEL;
    int64_t row_bytes = head->stride * pw_kv_element_bytes(head->format);
    float *vectors = scratch + PW_TILE_ROWS * PW_ROW_STRIDE, *products = vectors + PW_CHUNK * PW_LATENT_STRIDE;
    matrix q = {queries->q, padded, PW_PANEL, NULL};
    for (int64_t j = all.begin; j < all.end; ++j) {
        int64_t slot = origin + (queries->chosen ? queries->chosen[j] - chunk * PW_CHUNK : j);
        take_latent(head->format, head->head_dim, (const char *)head->values + slot * row_bytes, vectors + j * PW_LATENT_STRIDE);
    }
    for (int64_t j = all.begin; j < all.end; j += ATTEND_ROWS) {
        int now = all.end - j < ATTEND_ROWS ? (int)(all.end - j) : ATTEND_ROWS;
        latent_multiply(now, padded / PW_PANEL, head->head_dim, vectors + j * PW_LATENT_STRIDE, q, products + j * padded, padded);
    }
    return (latent_chunk){vectors, products, padded};
}

static void attend_tile_latent(const pw_kv_head *head, const pw_queries *queries, int row, int rows, int64_t chunk,
                               const latent_chunk *data, float *scores, pw_partial out) {
    span own[ATTEND_ROWS], all = NOTHING;
    for (int r = 0; r < rows; ++r) {
        own[r] = queries->chosen ? (span){0, queries->n_chosen} : seen_by_row(queries, row + r, chunk);
        all = seen_by_either(all, own[r]);
    }
    for (int64_t j = all.begin; j < all.end; ++j)
        for (int r = 0; r < rows; ++r) scores[r * PW_ROW_STRIDE + j] = data->products[j * data->padded + row + r];
    for (int r = 0; r < rows && queries->cap > 0 && all.begin < all.end; ++r) {
        float *seen = scores + r * PW_ROW_STRIDE + all.begin;
        ISA(cap)(all.end - all.begin, queries->cap, seen, seen);
    }
    weigh(scores, own, rows, all, out.top + row, out.sum + row);
    matrix values = {data->vectors + all.begin * PW_LATENT_STRIDE, PW_LATENT_STRIDE, PW_PANEL, NULL};
    attend_multiply(rows, head->value_dim / PW_PANEL, PW_KV_F32, all.end - all.begin, scores + all.begin, values,
                    out.values + (int64_t)row * head->value_dim, head->value_dim);
}

/* most: rows of a tile. all: what any row sees of the chunk, whose first position lies in slot `origin`. */
static void attend_chunk_latent(const pw_kv_head *head, const pw_queries *queries, int most, span all, int64_t chunk,
                                int64_t origin, float *scratch, pw_partial out) {
    if (queries->chosen) all = (span){0, queries->n_chosen};
    latent_chunk data = multiply_chunk(head, queries, all, chunk, origin, scratch);
    for (int row = 0; row < queries->rows; row += most) {
        int rows = queries->rows - row < most ? queries->rows - row : most;
        attend_tile_latent(head, queries, row, rows, chunk, &data, scratch + LEAD, out);
    }
}

/* Each product off by at most head_dim 2^-24 |query| |key|, and the sum by (heads / 16 + 6) 2^-24 of its magnitudes more. */
void ISA(score_keys)(const pw_kv_head *head, const pw_queries *queries, const float *weights, int64_t slot, int64_t count,
                     float *scratch, float *scores) {
    latent_chunk data = multiply_chunk(head, queries, (span){0, count}, 0, slot, scratch);
    for (int64_t j = 0; j < count; ++j) {
        sixteen sum = no_sums();
        for (int64_t i = 0; i < data.padded; i += SIXTEEN)
            PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
                vf product = v_load(data.products + j * data.padded + i + part * LANES);
                sum.part[part] = v_fma(v_load(weights + i + part * LANES), v_max(product, v_zero()), sum.part[part]);
            }
        scores[j] = sum_of_sixteen(sum);
    }
}
