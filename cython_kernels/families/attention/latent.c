/* Attention over latent vectors: of each position one vector of head_dim numbers, the key of every query head, whose first
 * value_dim numbers are the value. Vectors of a chunk become float32 once, for scores and values of all rows.
 *
 * Sixteen query rows share a vector register, and each number of a key meets them all: a score is the same chain of
 * multiply-adds over the dimensions as where keys lie in panels, and the bound is that of attention.c. */

/* One stored vector as float32; what is left of it after whole registers by way of one. */
static void take_latent(int format, int64_t dim, const char *from, float *to) {
    int64_t whole = dim / LANES * LANES, bytes = pw_kv_element_bytes(format);
    widen(format, whole, from, to);
    if (whole == dim) return;
    char rest[LANES * sizeof(float)] = {0};
    float last[LANES];
    memcpy(rest, from + whole * bytes, (size_t)((dim - whole) * bytes));
    widen(format, LANES, rest, last);
    memcpy(to + whole, last, sizeof(float) * (size_t)(dim - whole));
}

/* What a chunk is to all tiles of rows. */
typedef struct {
    const float *vectors;  /* [position][PW_LATENT_STRIDE] */
    const float *products; /* [position][padded]: scores by position, then query row */
    int64_t padded;
} latent_chunk;

/* Products of the vectors [all.begin, all.end) of a chunk, whose first lies in slot `origin`, or of the chosen ones, with the
 * queries of all rows. */
static latent_chunk multiply_chunk(const pw_kv_head *head, const pw_queries *queries, span all, int64_t origin, float *scratch) {
    int64_t padded = (queries->rows + PW_PANEL - 1) / PW_PANEL * PW_PANEL;
    int64_t row_bytes = head->stride * pw_kv_element_bytes(head->format);
    float *vectors = scratch + PW_TILE_ROWS * PW_ROW_STRIDE, *products = vectors + PW_CHUNK * PW_LATENT_STRIDE;
    matrix q = {queries->q, padded, PW_PANEL, NULL};
    for (int64_t j = all.begin; j < all.end; ++j) {
        int64_t slot = queries->chosen ? queries->chosen[j] : origin + j;
        take_latent(head->format, head->head_dim, (const char *)head->values + slot * row_bytes, vectors + j * PW_LATENT_STRIDE);
    }
    for (int64_t j = all.begin; j < all.end; j += ATTEND_ROWS) {
        int now = all.end - j < ATTEND_ROWS ? (int)(all.end - j) : ATTEND_ROWS;
        attend_multiply(now, padded / PW_PANEL, WITH_LATENT, head->head_dim, vectors + j * PW_LATENT_STRIDE, q,
                        products + j * padded, padded);
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
    latent_chunk data = multiply_chunk(head, queries, all, origin, scratch);
    for (int row = 0; row < queries->rows; row += most) {
        int rows = queries->rows - row < most ? queries->rows - row : most;
        attend_tile_latent(head, queries, row, rows, chunk, &data, scratch + LEAD, out);
    }
}

/* Each product off by at most head_dim 2^-24 |query| |key|, and the sum by (heads / 16 + 6) 2^-24 of its magnitudes more. */
void ISA(score_keys)(const pw_kv_head *head, const pw_queries *queries, const float *weights, int64_t slot, int64_t count,
                     float *scratch, float *scores) {
    latent_chunk data = multiply_chunk(head, queries, (span){0, count}, slot, scratch);
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
