/* Prototype: attention of one decode step over a frozen prefix whose keys and values are a bitmap and float16, beside the
 * engine's own attention over dense ones. Run by ../sparse_kv.py, which compiles it with families/ops.c as a family of one
 * instruction set is.
 *
 *     sparse_kv HEADS KV_HEADS HEAD_DIM LAYERS TOKENS TAIL THREADS ROUNDS FORM...
 *
 * TOKENS, a multiple of 128, are the prefix; TAIL tokens follow. A form is the number of a pw_kv_format, in which all of them
 * are, or K:V, shares of zeros: then the smallest magnitudes of a layer's keys and of its values are zero in the prefix, which
 * is sparse, and the tail is float16. The engine's code attends over whatever is dense, and merges. THREADS 0: one, by the
 * processor time that it takes, for a machine that does other things too.
 *
 * A chunk of 128 positions of a KV head is, in this order, each part a multiple of 4 bytes:
 *     starts   of each panel of keys and each block of values, among the kept numbers: uint16
 *     masks    of each vector row of 32 numbers: uint32. Keys first: rows of a panel are two dimensions of its 16 slots. Then
 *              blocks of 64 columns of values: two rows for each slot
 *     kept     float16, keys first
 * A row is expanded in a register and multiplied there, in the order in which the engine multiplies the dense row.
 *
 * For each form a line: its number or shares, bytes of a step, 1 if every bit of the result is that of the engine's float16
 * over the masked keys and values (of a dense form: 1), nanoseconds of a step in each round. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "families/attention.c"

enum { VECTOR = 32, BLOCK = 64, PANELS = PW_CHUNK / PW_PANEL, AT_ONCE = 4, HUGE_PAGE = 2 << 20 };
enum { MOST_ROWS = 6, MOST_FORMS = 16, MOST_THREADS = 64, MOST_ROUNDS = 64 };

static int heads, kv_heads, dim, layers, tokens, tail, threads, rounds, rows; /* rows: of queries for each KV head */
static bool busy;

/* Zeros; what is loaded may end behind them. Huge pages where there are many, as the engine has them. */
static void *room(size_t bytes) {
    size_t page = bytes < HUGE_PAGE ? 4096 : HUGE_PAGE, all = (bytes + 4096 + page - 1) / page * page;
    void *memory = aligned_alloc(page, all);
    if (!memory) exit(3);
    if (page == HUGE_PAGE) madvise(memory, all, MADV_HUGEPAGE); /* if refused, small ones serve too */
    return memset(memory, 0, all);
}

static double drawn(void) { /* a sum of four: near enough to normal */
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)((state & 0xffff) + (state >> 16 & 0xffff) + (state >> 32 & 0xffff) + (state >> 48)) / 65536.0 - 2.0;
}

/* ---- storage ---------------------------------------------------------------------------------------------------- */

static int64_t slots_of(int64_t positions) { return (positions + PW_CHUNK - 1) / PW_CHUNK * PW_CHUNK; }
static int blocks(void) { return dim / BLOCK; }
static int64_t starts_bytes(void) { return (2 * (PANELS + blocks()) + 3) / 4 * 4; }
static int64_t key_rows(void) { return dim / 2; }          /* of a panel */
static int64_t masks_of_keys(void) { return PANELS * key_rows(); }
static int64_t masks_of_values(void) { return blocks() * (2 * PW_CHUNK); }

typedef struct {
    const uint16_t *starts;
    const uint32_t *masks;
    const uint16_t *kept;
} sparse_chunk;

static sparse_chunk sparse_chunk_at(const char *at) {
    const char *masks = at + starts_bytes(), *kept = masks + 4 * (masks_of_keys() + masks_of_values());
    return (sparse_chunk){(const uint16_t *)(const void *)at, (const uint32_t *)(const void *)masks,
                          (const uint16_t *)(const void *)kept};
}

static int64_t pack_row(const uint16_t *row, uint32_t *mask, uint16_t *kept) {
    int64_t n = 0;
    *mask = 0;
    for (int i = 0; i < VECTOR; ++i)
        if (row[i]) *mask |= (uint32_t)1 << i, kept[n++] = row[i];
    return n;
}

/* Bytes that a chunk of a dense head takes at `to`. */
static int64_t pack_chunk(const pw_kv_head *head, int64_t chunk, char *to) {
    sparse_chunk at = sparse_chunk_at(to);
    uint16_t *starts = (uint16_t *)(void *)to, *kept = (uint16_t *)(uintptr_t)at.kept;
    uint32_t *mask = (uint32_t *)(uintptr_t)at.masks;
    const uint16_t *keys = (const uint16_t *)head->keys + chunk * PW_CHUNK * dim;
    const uint16_t *values = (const uint16_t *)head->values + chunk * PW_CHUNK * dim;
    int64_t n = 0;
    for (int panel = 0; panel < PANELS; ++panel) {
        starts[panel] = (uint16_t)n;
        for (int64_t row = 0; row < key_rows(); ++row, keys += VECTOR) n += pack_row(keys, mask++, kept + n);
    }
    for (int block = 0; block < blocks(); ++block) {
        starts[PANELS + block] = (uint16_t)n;
        for (int slot = 0; slot < PW_CHUNK; ++slot)
            for (int half = 0; half < BLOCK; half += VECTOR)
                n += pack_row(values + slot * dim + block * BLOCK + half, mask++, kept + n);
    }
    return ((char *)(kept + n) - to + 3) / 4 * 4;
}

/* The smallest magnitudes of a layer's keys (or values) in the prefix become zero. */
static void prune(const pw_kv_head *of, bool values, double zeros) {
    static int64_t count[1 << 15];
    int64_t n = (int64_t)tokens * dim, left = (int64_t)(zeros * (double)(n * kv_heads));
    memset(count, 0, sizeof count);
    for (int h = 0; h < kv_heads; ++h) {
        const uint16_t *x = values ? of[h].values : of[h].keys;
        for (int64_t i = 0; i < n; ++i) ++count[x[i] & 0x7fff];
    }
    int most = 0; /* magnitude up to which all go, as far as `left` of that very magnitude */
    while (left > count[most]) left -= count[most++];
    for (int h = 0; h < kv_heads; ++h) {
        uint16_t *x = values ? of[h].values : of[h].keys;
        for (int64_t i = 0; i < n; ++i)
            if ((x[i] & 0x7fff) < most || ((x[i] & 0x7fff) == most && left-- > 0)) x[i] = 0;
    }
}

/* ---- the kernel ------------------------------------------------------------------------------------------------- */

/* What is read later and asked for now. */
typedef struct {
    const char *at, *end;
} wanted;

PW_INLINE void ask(wanted *w, const int lines) {
    if (w->at >= w->end) return;
    PW_UNROLL for (int i = 0; i < lines; ++i) __builtin_prefetch(w->at + 64 * i, 0, 2);
    w->at += 64 * lines;
}

/* Row `mask` of 32 numbers from *kept on, as two vectors of float32. */
PW_INLINE void expand_two(uint32_t mask, const uint16_t **kept, vf *low, vf *high) {
    vi row = expand_words(vi_set1(0), mask, *kept);
    *kept += __builtin_popcount(mask);
    *low = _mm512_cvtph_ps(_mm512_castsi512_si256(row));
    *high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(row, 1));
}

/* Scores of AT_ONCE panels from `first` on. Several at once, because a row waits for the number that the one before kept. */
PW_INLINE void scores_of_panels(const int n, const sparse_chunk *chunk, int first, const float *q, float *scores, wanted *w) {
    vf sum[MOST_ROWS][AT_ONCE];
    const uint16_t *kept[AT_ONCE];
    const uint32_t *masks = chunk->masks + first * key_rows();
    int64_t steps = key_rows();
    PW_UNROLL for (int p = 0; p < AT_ONCE; ++p) {
        kept[p] = chunk->kept + chunk->starts[first + p];
        PW_UNROLL for (int r = 0; r < n; ++r) sum[r][p] = v_zero();
    }
    for (int64_t k = 0; k < steps; ++k) {
        ask(w, 3);
        PW_UNROLL for (int p = 0; p < AT_ONCE; ++p) {
            vf even, odd;
            expand_two(masks[p * steps + k], &kept[p], &even, &odd);
            PW_UNROLL for (int r = 0; r < n; ++r) {
                sum[r][p] = v_fma(v_set1(q[r * PW_ROW_STRIDE + 2 * k]), even, sum[r][p]);
                sum[r][p] = v_fma(v_set1(q[r * PW_ROW_STRIDE + 2 * k + 1]), odd, sum[r][p]);
            }
        }
    }
    PW_UNROLL for (int p = 0; p < AT_ONCE; ++p)
        PW_UNROLL for (int r = 0; r < n; ++r) v_store(scores + r * PW_ROW_STRIDE + (first + p) * PW_PANEL, sum[r][p]);
}

PW_INLINE void values_of_block(const int n, const sparse_chunk *chunk, int block, const float *weights, float *out, wanted *w) {
    enum { VECTORS = BLOCK / LANES };
    vf sum[MOST_ROWS][VECTORS];
    const uint16_t *kept = chunk->kept + chunk->starts[PANELS + block];
    const uint32_t *masks = chunk->masks + masks_of_keys() + block * (2 * PW_CHUNK);
    PW_UNROLL for (int r = 0; r < n; ++r)
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) sum[r][v] = v_zero();
    for (int64_t slot = 0; slot < PW_CHUNK; ++slot) {
        vf x[VECTORS];
        ask(w, 2);
        PW_UNROLL for (int v = 0; v < VECTORS; v += 2) expand_two(masks[2 * slot + v / 2], &kept, &x[v], &x[v + 1]);
        PW_UNROLL for (int r = 0; r < n; ++r)
            PW_UNROLL for (int v = 0; v < VECTORS; ++v)
                sum[r][v] = v_fma(v_set1(weights[r * PW_ROW_STRIDE + slot]), x[v], sum[r][v]);
    }
    PW_UNROLL for (int r = 0; r < n; ++r)
        PW_UNROLL for (int v = 0; v < VECTORS; ++v) v_store(out + r * dim + block * BLOCK + v * LANES, sum[r][v]);
}

/* attend_chunk of a whole chunk that every row sees. After it comes what lies at `next`. */
PW_INLINE void attend_sparse(const int n, const char *at, const char *end, const char *next, const float *q, float *scores,
                             pw_partial out) {
    static const span WHOLE[MOST_ROWS] = {{0, PW_CHUNK}, {0, PW_CHUNK}, {0, PW_CHUNK}, {0, PW_CHUNK}, {0, PW_CHUNK}, {0, PW_CHUNK}};
    sparse_chunk chunk = sparse_chunk_at(at);
    wanted own = {(const char *)(chunk.kept + chunk.starts[PANELS]), end};
    wanted later = {next, next + (own.at - at)}; /* keys of a chunk take about as much as those of the one before */
    for (int panel = 0; panel < PANELS; panel += AT_ONCE) scores_of_panels(n, &chunk, panel, q, scores, &own);
    weigh(scores, WHOLE, n, WHOLE[0], out.top, out.sum);
    for (int block = 0; block < blocks(); ++block) values_of_block(n, &chunk, block, scores, out.values, &later);
}

typedef void attend_sparse_rows(const char *at, const char *end, const char *next, const float *q, float *scores, pw_partial out);
#define SPARSE_ROWS(N)                                                                                                      \
    static void attend_sparse_##N(const char *at, const char *end, const char *next, const float *q, float *scores,         \
                                  pw_partial out) {                                                                         \
        attend_sparse(N, at, end, next, q, scores, out);                                                                    \
    }
SPARSE_ROWS(1) SPARSE_ROWS(2) SPARSE_ROWS(3) SPARSE_ROWS(4) SPARSE_ROWS(5) SPARSE_ROWS(6)
static attend_sparse_rows *const attend_sparse_of[MOST_ROWS] = {attend_sparse_1, attend_sparse_2, attend_sparse_3,
                                                                attend_sparse_4, attend_sparse_5, attend_sparse_6};

/* ---- forms ------------------------------------------------------------------------------------------------------ */

/* Keys and values of all layers, and what queries are in front of them. A layer is one that was drawn, copied. */
typedef struct {
    const char *label;
    int format;                    /* of the dense part */
    bool sparse;                   /* of the prefix */
    int64_t dense_slots, dense_bytes; /* of a KV head: all positions, or the tail */
    char *dense, *packed;          /* [layers][kv_heads] */
    int64_t *chunk_at;             /* [kv_heads][chunks + 1] of one layer's packed bytes */
    int64_t layer_bytes, bytes;    /* packed; all that a step reads */
    float *q, *out;                /* [kv_heads * rows][PW_ROW_STRIDE]; [kv_heads * rows][dim] of the first layer */
} form;

static pw_kv_head dense_head(const form *f, int64_t layer, int64_t head) {
    return pw_kv_head_at(f->dense + (layer * kv_heads + head) * f->dense_bytes, f->dense_slots, f->format, dim);
}

static const char *packed_chunk(const form *f, int64_t layer, int64_t head, int64_t chunk) {
    return f->packed + layer * f->layer_bytes + f->chunk_at[head * (tokens / PW_CHUNK + 1) + chunk];
}

static const void *first_keys(const form *f, int64_t layer, int64_t head) {
    return f->sparse ? packed_chunk(f, layer, head, 0) : dense_head(f, layer, head).keys;
}

/* Positions [first, end) of x[kv_heads][tokens + tail][2][dim] into one layer. */
static void store(form *f, const float *x, int64_t first, int64_t end) {
    for (int h = 0; h < kv_heads; ++h) {
        pw_kv_head head = dense_head(f, 0, h);
        for (int64_t position = first; position < end; ++position) {
            const float *row = x + ((int64_t)h * (tokens + tail) + position) * 2 * dim;
            ISA(store_key)(&head, position - first, row);
            ISA(store_value)(&head, position - first, row + dim);
        }
    }
}

static char *copied(char *layer, int64_t bytes) {
    char *all = room((size_t)(bytes * layers));
    for (int i = 0; i < layers; ++i) memcpy(all + i * bytes, layer, (size_t)bytes);
    free(layer);
    return all;
}

static form dense_form(const char *label, int format, const float *x, const float *q, int64_t first, int64_t positions) {
    form f = {.label = label, .format = format, .dense_slots = slots_of(positions)};
    size_t floats = (size_t)(kv_heads * rows) * PW_ROW_STRIDE;
    f.dense_bytes = f.dense_slots * pw_kv_slot_bytes(format, dim);
    f.dense = room((size_t)(f.dense_bytes * kv_heads));
    f.bytes = (int64_t)layers * kv_heads * positions * pw_kv_slot_bytes(format, dim);
    store(&f, x, first, first + positions);
    f.q = room(sizeof(float) * floats);
    f.out = room(sizeof(float) * (size_t)(kv_heads * rows * dim));
    memcpy(f.q, q, sizeof(float) * floats);
    ISA(prepare_queries)(format, dim, kv_heads * rows, f.q);
    return f;
}

/* The prefix of one masked layer, packed. */
static void pack(form *f, const form *masked) {
    int64_t chunks = tokens / PW_CHUNK, at = 0, most = starts_bytes() + 4 * (masks_of_keys() + masks_of_values()) + 4 * PW_CHUNK * dim;
    char *layer = room((size_t)((most + 4) * chunks * kv_heads));
    f->chunk_at = room(sizeof(int64_t) * (size_t)(kv_heads * (chunks + 1)));
    for (int h = 0; h < kv_heads; ++h) {
        pw_kv_head head = dense_head(masked, 0, h);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            f->chunk_at[h * (chunks + 1) + chunk] = at;
            at += pack_chunk(&head, chunk, layer + at);
        }
        f->chunk_at[h * (chunks + 1) + chunks] = at;
    }
    f->layer_bytes = at;
    f->bytes += at * layers;
    f->packed = copied(layer, at);
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

typedef struct {
    float *scratch, *tops; /* of attend_chunk; of two partials */
} bench;

static bench benches[MOST_THREADS]; /* of each thread */

static void make_benches(void) {
    size_t partial = 2 * PW_PANEL + (size_t)rows * (size_t)dim;
    for (int i = 0; i < threads; ++i)
        benches[i] = (bench){room(sizeof(float) * (size_t)pw_attention_scratch(dim)), room(2 * sizeof(float) * partial)};
}

/* One KV head of one layer; `next` is read after it. */
static void attend(const form *f, int64_t layer, int64_t h, const void *next, const bench *b) {
    int64_t firsts[MOST_ROWS] = {0}, lasts[MOST_ROWS], prefix = f->sparse ? tokens / PW_CHUNK : 0;
    int64_t chunks = slots_of(tokens + tail) / PW_CHUNK;
    pw_partial part = {b->tops, b->tops + PW_PANEL, b->tops + 2 * PW_PANEL};
    pw_partial into = {part.values + rows * dim, part.values + rows * dim + PW_PANEL, part.values + rows * dim + 2 * PW_PANEL};
    float *q = f->q + h * rows * PW_ROW_STRIDE;
    pw_queries queries = {.q = q, .first = firsts, .last = lasts, .rows = rows};
    pw_kv_head head = dense_head(f, layer, h);
    for (int r = 0; r < rows; ++r) lasts[r] = tokens + tail - 1;
    ISA(begin)(rows, dim, into);
    for (int64_t chunk = 0; chunk < prefix; ++chunk) {
        const char *end = packed_chunk(f, layer, h, chunk + 1), *later = chunk + 1 < prefix ? end : head.keys;
        attend_sparse_of[rows - 1](packed_chunk(f, layer, h, chunk), end, later, q, b->scratch + LEAD, part);
        ISA(merge)(rows, dim, part, into);
    }
    for (int64_t chunk = prefix; chunk < chunks; ++chunk) {
        int64_t slot = (chunk - prefix) * PW_CHUNK, panel = slot / PW_PANEL + PANELS;
        const char *keys = (const char *)head.keys + panel * PW_PANEL * pw_key_elements(&head) * pw_kv_element_bytes(head.format);
        queries.next_keys = chunk + 1 < chunks ? keys : next;
        ISA(attend_chunk)(&head, &queries, chunk, slot, b->scratch, part);
        ISA(merge)(rows, dim, part, into);
    }
    for (int r = 0; r < rows && layer == 0; ++r)
        ISA(finish)(dim, into.sum[r], into.values + r * dim, f->out + (h * rows + r) * dim);
}

typedef struct {
    const form *of;
    int64_t layers;
    atomic_long next;
    atomic_int members;
} step;

static void *take_portions(void *argument) {
    step *s = argument;
    const bench *own_bench = &benches[atomic_fetch_add(&s->members, 1)];
    long count = (long)(s->layers * kv_heads);
    for (long own = atomic_fetch_add(&s->next, 1), next; own < count; own = next) {
        next = atomic_fetch_add(&s->next, 1);
        const void *keys = next < count ? first_keys(s->of, next / kv_heads, next % kv_heads) : NULL;
        attend(s->of, own / kv_heads, own % kv_heads, keys, own_bench);
    }
    return NULL;
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(busy ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* Nanoseconds of the attention of a step over so many layers, by all threads. */
static double run(const form *f, int64_t n_layers) {
    step s = {.of = f, .layers = n_layers};
    pthread_t team[MOST_THREADS];
    double began = now_ns();
    for (int i = 1; i < threads; ++i)
        if (pthread_create(&team[i], NULL, take_portions, &s)) exit(3);
    take_portions(&s);
    for (int i = 1; i < threads; ++i) pthread_join(team[i], NULL);
    return now_ns() - began;
}

/* ---- all forms -------------------------------------------------------------------------------------------------- */

static float *drawn_rows(int64_t n, int64_t width, int64_t stride, double factor) {
    float *x = room(sizeof(float) * (size_t)(n * stride));
    for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < width; ++k) x[i * stride + k] = (float)(factor * drawn());
    return x;
}

/* A sparse form and, in *equal, if it attends as the engine does over the masked keys and values. */
static form sparse_form(const char *label, const float *x, const float *q, int *equal) {
    double zeros[2];
    form masked = dense_form(label, PW_KV_F16, x, q, 0, tokens + tail), f = dense_form(label, PW_KV_F16, x, q, tokens, tail);
    pw_kv_head of[256];
    if (sscanf(label, "%lf:%lf", &zeros[0], &zeros[1]) != 2 || kv_heads > 256) exit(2);
    for (int h = 0; h < kv_heads; ++h) of[h] = dense_head(&masked, 0, h);
    prune(of, false, zeros[0]);
    prune(of, true, zeros[1]);
    f.sparse = true;
    f.dense = copied(f.dense, f.dense_bytes * kv_heads);
    pack(&f, &masked);
    run(&masked, 1);
    run(&f, 1);
    *equal = memcmp(f.out, masked.out, sizeof(float) * (size_t)(kv_heads * rows * dim)) == 0;
    free(masked.dense), free(masked.q), free(masked.out);
    return f;
}

int main(int argc, char **argv) {
    int *const given[] = {&heads, &kv_heads, &dim, &layers, &tokens, &tail, &threads, &rounds};
    static form forms[MOST_FORMS];
    static double ns[MOST_FORMS][MOST_ROUNDS];
    int equal[MOST_FORMS], n = argc - 9;
    if (n < 1 || n > MOST_FORMS) return 2;
    for (int i = 0; i < 8; ++i) *given[i] = atoi(argv[1 + i]);
    rows = heads / kv_heads;
    busy = threads == 0;
    threads += busy;
    if (rows < 1 || rows > MOST_ROWS || dim % BLOCK || dim > 256 || tokens % PW_CHUNK || tail < 1 || threads < 1 || threads > MOST_THREADS || rounds > MOST_ROUNDS)
        return 2;
    make_benches();
    float *x = drawn_rows((int64_t)kv_heads * (tokens + tail), 2 * dim, 2 * dim, 1.0);
    float *q = drawn_rows(kv_heads * rows, dim, PW_ROW_STRIDE, 2.0 / sqrt((double)dim));
    for (int i = 0; i < n; ++i) {
        char *label = argv[9 + i];
        equal[i] = 1;
        if (strchr(label, ':')) {
            forms[i] = sparse_form(label, x, q, &equal[i]);
        } else {
            forms[i] = dense_form(label, atoi(label), x, q, 0, tokens + tail);
            forms[i].dense = copied(forms[i].dense, forms[i].dense_bytes * kv_heads);
        }
    }
    for (int round = -1; round < rounds; ++round)
        for (int turn = 0; turn < n; ++turn) {
            int i = round % 2 ? n - 1 - turn : turn;
            double taken = run(&forms[i], layers);
            if (round >= 0) ns[i][round] = taken;
        }
    for (int i = 0; i < n; ++i) {
        printf("%s %lld %d", forms[i].label, (long long)forms[i].bytes, equal[i]);
        for (int round = 0; round < rounds; ++round) printf(" %.0f", ns[i][round]);
        printf("\n");
    }
    return 0;
}
