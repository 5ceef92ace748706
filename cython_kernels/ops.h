/* The kernels beside the matrix products: one slot per function, filled per ISA from families/ (dispatch.h). */
#ifndef PHASEWISE_OPS_H
#define PHASEWISE_OPS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PW_CHUNK = 128,         /* positions that one step of attention covers; multiples of it, counted from position 0 */
    PW_MAX_HEAD_DIM = 512,
    PW_ROW_STRIDE = 528,    /* floats between rows of attention's scratch: a head or a padded chunk; no power of two */
    PW_MAX_LATENT_DIM = 576, /* numbers of a latent vector */
    PW_MAX_INDEX_DIM = 128,  /* numbers of an indexer's key behind it */
    PW_LATENT_STRIDE = 592, /* floats between such vectors in scratch; no power of two */
    PW_TILE_ROWS = 12,      /* most rows that any ISA's attention tile holds */
};

/* How keys and values are stored. In int8 and int16, each key and each value has a scale of its own; an element of int16
 * is a word of two numbers, the first in the lower half. In int4, every 32 numbers of
 * them have a scale and a minimum: an element is a word, the two as bfloat16 (scale low, minimum high), and then up to
 * four words of eight codes each, the first code in the lowest bits. */
typedef enum { PW_KV_F32, PW_KV_F16, PW_KV_BF16, PW_KV_INT8, PW_KV_INT4, PW_KV_INT16, PW_KV_FORMATS } pw_kv_format;

enum { PW_KV_GROUP = 32, PW_KV_CODES_PER_WORD = 8 }; /* of int4 */

static inline int64_t pw_kv_element_bytes(int32_t format) {
    return format == PW_KV_INT8 ? 1 : format == PW_KV_F16 || format == PW_KV_BF16 ? 2 : 4;
}

/* Elements that hold n numbers. */
static inline int64_t pw_kv_elements(int32_t format, int64_t n) {
    if (format == PW_KV_INT16) return n / 2;
    if (format != PW_KV_INT4) return n;
    return (n + PW_KV_CODES_PER_WORD - 1) / PW_KV_CODES_PER_WORD + (n + PW_KV_GROUP - 1) / PW_KV_GROUP;
}

static inline bool pw_kv_has_scales(int32_t format) { return format == PW_KV_INT8 || format == PW_KV_INT16; }

/* Whole numbers of int16: a key has at most pw_key_limit, so that its product with a query of this 2-norm, rounded, stays
 * below 2^31: (32704 + sqrt(head_dim) / 2) * limit * sqrt(head_dim). A value has at most PW_VALUE_LIMIT: so 128 weights
 * have 262,000 units together. What is below PW_KV_LEAST counts as nothing. */
#define PW_KV_QUERY_NORM 32704.0f
#define PW_VALUE_LIMIT 8191.0f
#define PW_KV_LEAST 0x1p-90f
static inline float pw_key_limit(int32_t head_dim) {
    float limit = 65536.0f / sqrtf((float)head_dim);
    return limit < 32767.0f ? floorf(limit) : 32767.0f;
}

/* One KV head of one layer. Keys lie in panels of 16 slots, [slot / 16][head_dim][16], so that a vector holds one
 * dimension of consecutive keys; values lie row by row, [slot][value_dim], value_dim = head_dim rounded up to 16. In
 * int4 and int16, elements stand in the place of dimensions: pw_kv_elements of each.
 *
 * Latent attention keeps one vector of head_dim numbers a slot in place of both, [slot][head_dim], in f32, f16 or bf16: it is
 * the key of all query heads, and its first value_dim numbers are their value. */
typedef struct {
    void *keys, *values;
    float *key_scales, *value_scales; /* [slot], where the format has scales; else NULL */
    int32_t format;                   /* pw_kv_format */
    int32_t head_dim;
    int32_t value_dim;
    int32_t stride; /* numbers from one latent vector to the next; 0: keys and values are of their own */
} pw_kv_head;

/* Elements of a slot among keys, and among values. */
static inline int64_t pw_key_elements(const pw_kv_head *head) {
    return head->stride ? 0 : pw_kv_elements(head->format, head->head_dim);
}
static inline int64_t pw_value_elements(const pw_kv_head *head) {
    return pw_kv_elements(head->format, head->stride ? head->stride : head->value_dim);
}

static inline int64_t pw_value_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

/* Bytes of one slot of a KV head. */
static inline int64_t pw_kv_slot_bytes(int32_t format, int64_t head_dim) {
    int64_t scales = pw_kv_has_scales(format) ? 2 * (int64_t)sizeof(float) : 0;
    int64_t elements = pw_kv_elements(format, head_dim) + pw_kv_elements(format, pw_value_dim(head_dim));
    return elements * pw_kv_element_bytes(format) + scales;
}

/* A head whose `slots` slots (a multiple of 16) begin at `memory`. */
static inline pw_kv_head pw_kv_head_at(char *memory, int64_t slots, int32_t format, int32_t head_dim) {
    int64_t value_dim = pw_value_dim(head_dim), bytes = pw_kv_element_bytes(format);
    char *values = memory + slots * pw_kv_elements(format, head_dim) * bytes;
    char *scales = values + slots * pw_kv_elements(format, value_dim) * bytes;
    pw_kv_head head = {memory, values, NULL, NULL, format, head_dim, (int32_t)value_dim, false};
    if (pw_kv_has_scales(format)) {
        head.key_scales = (float *)(void *)scales;
        head.value_scales = head.key_scales + slots;
    }
    return head;
}

/* Latent vectors that begin at `memory`. */
static inline pw_kv_head pw_latent_at(char *memory, int32_t format, int32_t head_dim, int32_t value_dim, int32_t stride) {
    pw_kv_head head = {memory, memory, NULL, NULL, format, head_dim, value_dim, stride};
    return head;
}

static inline bool pw_latent_can_be(int32_t format) {
    return format == PW_KV_F32 || format == PW_KV_F16 || format == PW_KV_BF16;
}

/* Activations by name, in the order of their numbers: of the gate of a feed-forward layer before it multiplies
 * (NAME_gate_lanes, families/rows/elementwise.c), and of a layer without a gate (NAME_lanes, families/rows/activations.c). */
#define PW_EACH_GATE(X) X(silu) X(gelu_tanh) X(clamped_silu) X(gelu) X(logistic)
#define PW_EACH_ACTIVATION(X) PW_EACH_OF_SUMS(X) X(xielu)
#define PW_EACH_OF_SUMS(X) X(gelu) X(gelu_tanh) X(silu) X(relu) X(relu2)
enum { PW_XIELU_NUMBERS = 4 }; /* of a layer: families/rows/activations.c */

#define PW_GATE_NUMBER(NAME) PW_GATE_##NAME,
#define PW_ACT_NUMBER(NAME) PW_ACT_##NAME,
#define PW_AS_TEXT(NAME) #NAME,
typedef enum { PW_EACH_GATE(PW_GATE_NUMBER) PW_GATES } pw_gate;
typedef enum { PW_EACH_ACTIVATION(PW_ACT_NUMBER) PW_ACTIVATIONS } pw_activation;

static inline const char *pw_gate_name(int number) {
    static const char *const names[] = {PW_EACH_GATE(PW_AS_TEXT)};
    return names[number];
}

static inline const char *pw_activation_name(int number) {
    static const char *const names[] = {PW_EACH_ACTIVATION(PW_AS_TEXT)};
    return names[number];
}

/* A LayerNorm. */
typedef struct {
    const float *weight, *bias; /* [n] */
    float eps;
} pw_norm;

/* Rows of queries, all of one sequence. */
typedef struct {
    const float *q;     /* [rows][PW_ROW_STRIDE], rotated and scaled as scores are, then prepared (prepare_queries); for
                         * latent vectors [head_dim][rows], rows up to a multiple of 16 */
    const int64_t *first, *last; /* positions that each row sees, inclusive */
    int32_t rows;
    int32_t tile_rows; /* rows that are computed together, as far as an ISA can; 0: as it likes */
    float cap; /* c: scores are c tanh(score / c); 0: as they are */
    const float *slopes;      /* [rows]: a score loses this much for each position between (ALiBi); NULL: nothing */
    const int64_t *positions; /* [rows], where there are slopes */
    const void *next_keys; /* what is read after the chunk, to be asked for meanwhile; NULL: nothing */
    const int32_t *chosen; /* slots of the latent vectors that all rows see, by position, PW_CHUNK to a chunk; NULL: first to last */
    int64_t n_chosen;
} pw_queries;

/* Softmax-weighted values, unfinished: the maximum score, the sum of weights, the weighted sum [rows][value_dim]. */
typedef struct {
    float *top, *sum, *values;
} pw_partial;

/* W[n][rank], rank small, in panels of 16 outputs: float32 [panels][rank][16], or bf16 [panels][(rank + 1) / 2][16][2]. */
typedef struct {
    const void *values;
    int64_t n, rank;
    bool is_bf16;
} pw_thin_weight;

/* Rows of a thin product: row i of x is added to row row_at[i] of y. */
typedef struct {
    const float *x;
    int64_t ldx;
    float *y;
    int64_t ldy;
    const int64_t *row_at;
    int64_t count;
} pw_thin_rows;

/* Of each pair: the cosine and sine of its angle; and what all are multiplied by afterwards. */
typedef struct {
    const float *cosine, *sine; /* [half] */
    float factor;
} pw_turn;

/* Of one row: its predecessors in a convolution, the oldest first and itself last. */
typedef struct {
    const float *const *rows; /* [taps] */
    const float *weights;     /* [taps] at weights_stride */
    int64_t weights_stride;
    const float *bias, *gate; /* NULL: none */
    int32_t taps;
    bool silu;
    float *y;
} pw_convolution;

/* Rows of one head of a sequence, and sixteen columns of its state. */
typedef struct {
    const float *query, *key, *value; /* rows at `stride` */
    const float *gates;               /* of a row: its decay; at factor_at what its change is multiplied by */
    const float *decays;              /* [key_dim] of a row, as far apart as gates, in place of its one decay, where the rule
                                       * erases; NULL: there are none */
    float *out;
    float *state; /* [key_dim][16] */
    int64_t n_rows, stride, gates_stride, factor_at, out_stride;
    int32_t key_dim;
    int32_t columns; /* of the sixteen that there are */
    float skip;      /* times the value, added to what is read; 0: nothing is */
    bool erases;     /* what the key reads is taken from the value before */
} pw_recurrence;

typedef struct {
    int32_t lanes;

    /* y[n] = x[n] * w[n] / sqrt(mean(x^2) + eps); y may be x. */
    void (*rmsnorm)(int64_t n, const float *x, const float *w, float eps, float *y);

    /* y[n] = (t - mean(t)) / sqrt(var(t) + eps) * weight + norm's bias, t = x + bias; bias may be NULL, y may be x. */
    void (*layernorm)(int64_t n, const float *x, const float *bias, const pw_norm *norm, float *y);

    /* x[n] += y[n] */
    void (*add)(int64_t n, const float *y, float *x);

    /* out[i] = (parts[0][i] + parts[1][i]) + ..., i < n; n_parts >= 1. `out` may be one of the parts. Each addition
     * rounds once, so every ISA finds the same bits. */
    void (*sum)(int n_parts, const float *const *parts, int64_t n, float *out);

    /* y: the pairs (x[i], x[half + i]), i < half, turned and multiplied; y may be x. */
    void (*rope)(int64_t half, const pw_turn *turn, const float *x, float *y);

    /* By the number of PW_EACH_GATE, y[n] = act(gate) * up; y may be gate or up. */
    void (*gates[PW_GATES])(int64_t n, const float *gate, const float *up, float *y);

    /* By the number of PW_EACH_ACTIVATION, y[n] = act(x + own), own a bias [n] or NULL; of xielu y = act(x) by the
     * numbers own[PW_XIELU_NUMBERS]. y may be x. */
    void (*activations[PW_ACTIVATIONS])(int64_t n, const float *x, const float *own, float *y);

    /* y[n] = c tanh(x / c), c > 0; y may be x. */
    void (*cap)(int64_t n, float c, const float *x, float *y);

    /* y[n] += factor * x[n] */
    void (*add_scaled)(int64_t n, float factor, const float *x, float *y);

    /* y += x W^T for panels [first, end), y at W's first output; the order of sums: families/rows/low_rank.c. */
    void (*add_low_rank)(const pw_thin_weight *w, int64_t first, int64_t end, const pw_thin_rows *rows);

    /* x[n] *= factor */
    void (*scale)(int64_t n, float factor, float *x);

    /* y[n] = exp(x - max) / sum; y may be x. */
    void (*softmax)(int64_t n, const float *x, float *y);

    void (*exponential)(int64_t n, const float *x, float *y);

    /* Elements of one row of a convolution over the rows before. */
    void (*convolve)(int64_t n, const pw_convolution *convolution);

    /* y[n] *= x[n] */
    void (*multiply)(int64_t n, const float *x, float *y);

    /* Rows in order; the state is then that after the last one. */
    void (*recur)(const pw_recurrence *recurrence);

    /* Stores one head's key or value of a slot. float16 saturates at 65504 instead of overflowing; int8 is rounded to
     * multiples of a 127th of the largest magnitude, int16 of a finer part (pw_key_limit), and of an infinity or a NaN
     * the whole row becomes NaN; int4 is
     * rounded within each group, and an infinity, a NaN or a spread beyond float32 makes its group NaN. */
    void (*store_key)(const pw_kv_head *head, int64_t slot, const float *key);
    void (*store_value)(const pw_kv_head *head, int64_t slot, const float *value);

    /* Rows of queries in place, PW_ROW_STRIDE floats apart, to what attend_chunk reads for a format. */
    void (*prepare_queries)(int32_t format, int32_t head_dim, int32_t rows, float *q);

    /* One chunk of positions, in the slots from `slot` on, for all rows: `out` is overwritten; rows that see nothing in
     * it change nothing in a merge. scratch: pw_attention_scratch floats. */
    void (*attend_chunk)(const pw_kv_head *head, const pw_queries *queries, int64_t chunk, int64_t slot,
                         float *scratch, pw_partial out);

    /* What an indexer says of `count` <= PW_CHUNK positions, in the slots from `slot` on: sums over queries of weight[rows]
     * times max(0, query . key), queries and scratch as attend_chunk has them for latent vectors. */
    void (*score_keys)(const pw_kv_head *head, const pw_queries *queries, const float *weights, int64_t slot, int64_t count,
                       float *scratch, float *scores);

    /* A partial that has seen nothing. */
    void (*begin)(int32_t rows, int32_t value_dim, pw_partial out);

    /* Adds a chunk to what came before it: into = into + part, for rows of value_dim. */
    void (*merge)(int32_t rows, int32_t value_dim, pw_partial part, pw_partial into);

    /* out[head_dim] = values / sum of one row. */
    void (*finish)(int32_t head_dim, float sum, const float *values, float *out);

    /* Index of the largest, the lowest of equals; NaN is never chosen unless all are (then 0). */
    int64_t (*argmax)(int64_t n, const float *x);

    /* log(sum(exp(x))) in double from float exponentials. */
    double (*logsumexp)(int64_t n, const float *x);

    /* Indices of the k largest, largest first, lower index first among equals; NaN counts as -infinity. Returns how
     * many were written, min(k, n). `heap` and `index` hold k entries. */
    int64_t (*top_k)(int64_t n, const float *x, int64_t k, float *heap, int64_t *index);
} pw_op_kernels;

/* Floats of scratch for attend_chunk over latent vectors, for queries of so many rows: a tile of scores, vectors as float32,
 * and their products with all queries. */
static inline int64_t pw_latent_scratch(int64_t padded_rows) {
    return (int64_t)PW_TILE_ROWS * PW_ROW_STRIDE + PW_CHUNK * (PW_LATENT_STRIDE + padded_rows);
}

/* Floats of scratch for attend_chunk: a tile of scores and a chunk of keys and values as float32. */
static inline int64_t pw_attention_scratch(int32_t head_dim) {
    return (int64_t)PW_TILE_ROWS * PW_ROW_STRIDE + 2 * (PW_CHUNK + 16) * pw_value_dim(head_dim);
}

#endif
