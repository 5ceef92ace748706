/* From the scores of a tile of rows over a chunk to weights: maxima, exponentials, sums. */

/* Sums of at most 24 registers of 32, or 12 of 16: few rows take more panels at once, so that each score or weight that
 * is broadcast meets more of them. EACH_TILE: X(rows, panels) of all of them. */
#if defined(__AVX512F__)
enum { ATTEND_ROWS = 12, WIDE_ROWS = 6, ATTEND_PANELS = 4, NARROW_PANELS = 2 };
#define NARROW(X, ROWS) X(ROWS, 1) X(ROWS, 2)
#define WIDE(X, ROWS) NARROW(X, ROWS) X(ROWS, 3) X(ROWS, 4)
#define EACH_TILE(X)                                                  \
    WIDE(X, 1) WIDE(X, 2) WIDE(X, 3) WIDE(X, 4) WIDE(X, 5) WIDE(X, 6) \
    NARROW(X, 7) NARROW(X, 8) NARROW(X, 9) NARROW(X, 10) NARROW(X, 11) NARROW(X, 12)
#elif defined(__AVX2__) || defined(PW_NEON)
enum { ATTEND_ROWS = 6, WIDE_ROWS = 0, ATTEND_PANELS = 1, NARROW_PANELS = 1 };
#define EACH_TILE(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1)
#else
enum { ATTEND_ROWS = 2, WIDE_ROWS = 0, ATTEND_PANELS = 1, NARROW_PANELS = 1 };
#define EACH_TILE(X) X(1, 1) X(2, 1)
#endif

enum { LEAD = PW_PANEL }; /* floats before a row of scores: a chunk may begin inside a panel */
static const float NOTHING_SEEN = -3.0e38f; /* a maximum below all scores; finite, so that differences are */

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

/* The whole sixteens of scores that hold what a row sees; what is beyond it there becomes -infinity. */
static span mask_edges(float *scores, span own) {
    span vectors = {own.begin / SIXTEEN * SIXTEEN, (own.end + SIXTEEN - 1) / SIXTEEN * SIXTEEN};
    fill(scores, vectors.begin, own.begin, -INFINITY);
    fill(scores, own.end, vectors.end, -INFINITY);
    return vectors;
}

/* What a row sees of a chunk of scores, less `slope` for each position between: one rounding, |score| + slope distance
 * times 2^-24. Lanes beyond what it sees are changed too, and thrown away later. */
static void lower_by_distance(const pw_queries *queries, int row, span own, int64_t chunk, float *scores) {
    static const float COUNT[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf slope = v_set1(-queries->slopes[row]), steps = v_load(COUNT);
    int64_t before = queries->positions[row] - chunk * PW_CHUNK;
    for (int64_t j = own.begin / LANES * LANES; j < own.end; j += LANES) {
        vf apart = v_sub(v_set1((float)(before - j)), steps);
        v_store(scores + j, v_fma(slope, v_max(apart, v_sub(v_zero(), apart)), v_load(scores + j)));
    }
}

static const float LOG2_E = 1.44269504f;

/* Of each row the sixteens that hold what it sees, with edges masked (none: begin = end), and its largest score. */
static void find_tops(float *scores, const span *own, int rows, span *vectors, float *top) {
    vf most[ATTEND_ROWS];
    for (int r = 0; r < rows; ++r) {
        float *row = scores + r * PW_ROW_STRIDE;
        vf maximum = v_set1(NOTHING_SEEN);
        if (own[r].begin == 0 && own[r].end == PW_CHUNK) {
            vectors[r] = own[r];
            PW_UNROLL for (int j = 0; j < PW_CHUNK; j += LANES) maximum = v_max(maximum, v_load(row + j));
        } else {
            vectors[r] = own[r].begin < own[r].end ? mask_edges(row, own[r]) : (span){0, 0};
            for (int64_t j = vectors[r].begin; j < vectors[r].end; j += LANES) maximum = v_max(maximum, v_load(row + j));
        }
        most[r] = maximum;
    }
    tops_of(rows, most, top);
}

/* Scores to weights in place, for what each row sees of `all`; 0 elsewhere in it. Sums stand for position mod 16.
 * Three passes over the rows, because within a row every pass waits for the whole of the one before. */
static void weigh(float *scores, const span *own, int rows, span all, float *top, float *sum) {
    span vectors[ATTEND_ROWS];
    sixteen total[ATTEND_ROWS];
    find_tops(scores, own, rows, vectors, top);
    for (int r = 0; r < rows; ++r) {
        float *row = scores + r * PW_ROW_STRIDE;
        vf factor = v_set1(LOG2_E), shift = v_set1(top[r]);
        sixteen sums = no_sums();
        for (int64_t j = vectors[r].begin; j < vectors[r].end; j += SIXTEEN)
            PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
                float *scored = row + j + part * LANES;
                vf weight = v_exp2(v_mul(v_sub(v_load(scored), shift), factor));
                v_store(scored, weight);
                sums.part[part] = v_add(sums.part[part], weight);
            }
        total[r] = sums;
        fill(row, all.begin, vectors[r].begin, 0.0f);
        fill(row, vectors[r].end > all.begin ? vectors[r].end : all.begin, all.end, 0.0f);
    }
    sums_of(rows, total, sum);
}
