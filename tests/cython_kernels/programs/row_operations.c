/* The operations beside products (ops.h), by the kernels named in argv[1], against float64: the bounds of their
 * sources. Attention against float64 over keys and values as they are stored. Exit status 0, or a broken bound on
 * stderr; 3: those kernels do not run here. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"

static const double U = 0x1p-24;
enum { MOST = 2200 };

static void must(int holds, const char *what, int64_t n) {
    if (holds) return;
    fprintf(stderr, "%s, n = %ld\n", what, (long)n);
    exit(1);
}

static float *random_row(int64_t n, float scale) {
    float *x = malloc((size_t)n * sizeof *x + 64); /* of its own length, so that a sanitizer sees what is beyond */
    for (int64_t i = 0; i < n; ++i) x[i] = scale * ((float)rand() / (float)RAND_MAX - 0.5f);
    return x;
}

static void elementwise(const pw_op_kernels *ops, int64_t n) {
    float *x = random_row(n, 20.0f), *y = random_row(n, 3.0f), *out = random_row(n, 1.0f), *sum = random_row(n, 1.0f);
    for (int64_t i = 0; i < n; ++i) sum[i] = x[i];
    ops->add(n, y, sum);
    ops->gates[PW_silu_gate](n, x, y, out);
    for (int64_t i = 0; i < n; ++i) {
        double want = (double)x[i] / (1.0 + exp(-(double)x[i])) * y[i];
        must(sum[i] == x[i] + y[i], "add rounds once", n);
        must(fabs(out[i] - want) <= 7 * U * fabs(want), "silu_gate", n);
    }
    ops->exponential(n, x, out);
    for (int64_t i = 0; i < n; ++i) {
        must(fabs(out[i] - exp((double)x[i])) <= 2 * U * exp((double)x[i]), "exp", n);
    }
}

static void reductions(const pw_op_kernels *ops, int64_t n) {
    float *x = random_row(n, 20.0f), *w = random_row(n, 2.0f), *y = random_row(n, 1.0f);
    double squares = 0.0, total = 0.0, top = x[0];
    int64_t first = 0;
    for (int64_t i = 0; i < n; ++i) {
        squares += (double)x[i] * x[i];
        if (x[i] > top) top = x[i], first = i;
    }
    for (int64_t i = 0; i < n; ++i) total += exp(x[i] - top);
    ops->rmsnorm(n, x, w, 1e-5f, y);
    double lanes = ops->lanes, bound = ((double)n / lanes / 4 + lanes + 8) * U;
    for (int64_t i = 0; i < n; ++i) {
        double want = x[i] * (double)w[i] / sqrt(squares / (double)n + 1e-5f);
        must(fabs(y[i] - want) <= bound * fabs(want), "rmsnorm", n);
    }
    bound = (1024 / lanes + lanes + 3 + 21 + 4) * U;
    ops->softmax(n, x, y);
    for (int64_t i = 0; i < n; ++i) {
        double want = exp(x[i] - top) / total;
        must(fabs(y[i] - want) <= bound * want, "softmax", n);
    }
    must(fabs(ops->logsumexp(n, x) - (top + log(total))) <= 2 * bound, "logsumexp", n);
    must(ops->argmax(n, x) == first, "argmax", n);
}

/* The bounds of families/rows/layernorm.c and families/rows/activations.c. */
static void centred(const pw_op_kernels *ops, int64_t n) {
    float *x = random_row(n, 8.0f), *bias = random_row(n, 2.0f), *w = random_row(n, 2.0f), *b = random_row(n, 2.0f);
    float *y = random_row(n, 1.0f);
    const pw_norm norm = {w, b, 1e-5f};
    ops->layernorm(n, x, bias, &norm, y);
    double mean = 0.0, size = 0.0, var = 0.0, rms = 0.0, g = (double)n / ops->lanes / 4 + ops->lanes + 4;
    for (int64_t i = 0; i < n; ++i) mean += ((double)x[i] + bias[i]) / (double)n, size += fabs((double)x[i] + bias[i]) / (double)n;
    for (int64_t i = 0; i < n; ++i) {
        double t = (double)x[i] + bias[i], d = t - mean, e = U * (2 * fabs(t) + g * size + fabs(d));
        var += d * d / (double)n, rms += e * e / (double)n;
    }
    double s = sqrt(var + 1e-5f);
    for (int64_t i = 0; i < n; ++i) {
        double t = (double)x[i] + bias[i], d = t - mean, e = U * (2 * fabs(t) + g * size + fabs(d));
        double bound = fabs(w[i]) / s * (e + fabs(d) * (sqrt(rms) / s + (g / 2 + 8) * U)) + 4 * U * (fabs(w[i] * d) / s + fabs(b[i]));
        must(fabs(y[i] - (d / s * w[i] + b[i])) <= bound, "layernorm", n);
    }
    ops->activations[PW_gelu_erf](n, x, bias, y);
    for (int64_t i = 0; i < n; ++i) {
        double t = (double)(x[i] + bias[i]);
        must(fabs(y[i] - t / 2 * (1 + erf(t / sqrt(2.0)))) <= 10 * U * fabs(t), "gelu_erf", n);
    }
}

static void turns(const pw_op_kernels *ops, int64_t half) {
    float *x = random_row(2 * half, 4.0f), *turned = random_row(2 * half, 1.0f), *thrice = random_row(2 * half, 1.0f), *c = random_row(half, 2.0f), *s = random_row(half, 2.0f);
    for (int64_t i = 0; i < 2 * half; ++i) turned[i] = x[i];
    pw_turn turn = {c, s, 1.0f}, times_three = {c, s, 3.0f};
    ops->rope(half, &turn, turned, turned);
    ops->rope(half, &times_three, x, thrice);
    for (int64_t i = 0; i < 2 * half; ++i) must(thrice[i] == turned[i] * 3.0f, "rope multiplies afterwards", half);
    for (int64_t i = 0; i < half; ++i) {
        double a = x[i], b = x[half + i], bound = (0x1p-23 + U) * (fabs(a) + fabs(b));
        must(fabs(turned[i] - (a * c[i] - b * s[i])) <= bound, "rope, first half", half);
        must(fabs(turned[half + i] - (b * c[i] + a * s[i])) <= bound, "rope, second half", half);
    }
}

/* Rows of queries over one chunk; row r sees positions up to r * 5. Keys and values are multiples of 2^-6, the largest of
 * each 127 / 64: every format but int4 and int16 holds them exactly, int8 with a scale of 2^-6. For int4 they are 16 values from -1
 * to 7/8, both ends in every group of 32: it holds them with a scale of 1/8. */
static void attends(const pw_op_kernels *ops, int32_t head_dim, int32_t format, int32_t rows) {
    enum { POSITIONS = PW_CHUNK };
    int32_t value_dim = (int32_t)pw_value_dim(head_dim);
    char *memory = calloc(POSITIONS, (size_t)pw_kv_slot_bytes(format, head_dim));
    pw_kv_head head = pw_kv_head_at(memory, POSITIONS, format, head_dim);
    float *q = calloc((size_t)rows * PW_ROW_STRIDE, 4), *out = calloc((size_t)head_dim, 4);
    float *keys = calloc((size_t)POSITIONS * head_dim, 4), *values = calloc((size_t)POSITIONS * head_dim, 4);
    int64_t *first = calloc((size_t)rows, 8), *last = calloc((size_t)rows, 8);
    for (int64_t i = 0; i < (int64_t)POSITIONS * head_dim; ++i) {
        keys[i] = i % head_dim ? (float)(rand() % 128 - 64) / 64.0f : 127.0f / 64.0f;
        values[i] = i % head_dim ? (float)(rand() % 128 - 64) / 64.0f : 127.0f / 64.0f;
    }
    for (int64_t i = 0; format == PW_KV_INT4 && i < (int64_t)POSITIONS * head_dim; ++i) {
        int64_t place = i % head_dim % PW_KV_GROUP;
        keys[i] = place < 2 ? (place ? 0.875f : -1.0f) : (float)(rand() % 16 - 8) / 8.0f;
        values[i] = place < 2 ? (place ? 0.875f : -1.0f) : (float)(rand() % 16 - 8) / 8.0f;
    }
    for (int64_t p = 0; p < POSITIONS; ++p) {
        ops->store_key(&head, p, keys + p * head_dim);
        ops->store_value(&head, p, values + p * head_dim);
    }
    for (int64_t i = 0; format == PW_KV_INT16 && i < (int64_t)POSITIONS * head_dim; ++i) { /* what was stored */
        const float unit = 127.0f / 64.0f / pw_key_limit(head_dim), value_unit = 127.0f / 64.0f / PW_VALUE_LIMIT;
        keys[i] = rintf(keys[i] / unit) * unit, values[i] = rintf(values[i] / value_unit) * value_unit;
    }
    for (int32_t r = 0; r < rows; ++r) {
        last[r] = r * 5 % POSITIONS;
        for (int32_t i = 0; i < head_dim; ++i) q[r * PW_ROW_STRIDE + i] = (float)(rand() % 128 - 64) / 128.0f;
    }
    pw_queries queries = {.q = q, .first = first, .last = last, .rows = rows};
    pw_partial part = {calloc((size_t)rows + 16, 4), calloc((size_t)rows + 16, 4), calloc((size_t)rows * value_dim, 4)};
    pw_partial into = {calloc((size_t)rows + 16, 4), calloc((size_t)rows + 16, 4), calloc((size_t)rows * value_dim, 4)};
    double pairs = ops->multiplies_pairs && pw_kv_has_scales(format);
    float *given = calloc((size_t)rows * PW_ROW_STRIDE, 4);
    memcpy(given, q, sizeof *q * (size_t)rows * PW_ROW_STRIDE);
    ops->prepare_queries(format, head_dim, rows, q);
    ops->begin(rows, value_dim, into);
    ops->attend_chunk(&head, &queries, 0, 0, calloc((size_t)pw_attention_scratch(head_dim), 4), part);
    ops->merge(rows, value_dim, part, into);
    for (int32_t r = 0; r < rows; ++r) {
        double weights[POSITIONS], total = 0.0, longest = 0.0;
        for (int64_t p = 0; p <= last[r]; ++p) {
            double score = 0.0, length = 0.0, own = 0.0;
            for (int32_t i = 0; i < head_dim; ++i) {
                score += (double)given[r * PW_ROW_STRIDE + i] * keys[p * head_dim + i];
                length += pow(keys[p * head_dim + i], 2), own += pow(given[r * PW_ROW_STRIDE + i], 2);
            }
            weights[p] = exp(score), total += weights[p];
            longest = fmax(longest, sqrt(length * own));
        }
        ops->finish(head_dim, into.sum[r], into.values + (int64_t)r * value_dim, out);
        double d = ((head_dim + 10) * longest + 4) * 0x1p-23; /* |k| sqrt(head_dim) >= sum |k_i| */
        double of_pairs = pairs * (0.501 * PW_CHUNK / 32767 + exp(1.002 * sqrt(head_dim) * longest / 32704) - 1) * 127 / 64;
        for (int32_t i = 0; i < head_dim; ++i) {
            double want = 0.0;
            for (int64_t p = 0; p <= last[r]; ++p) want += weights[p] / total * values[p * head_dim + i];
            must(fabs(out[i] - want) <= (2 * d + (POSITIONS + 7) * 0x1p-23) * 127 / 64 + of_pairs, "attention", rows);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 2 || pw_select(argv[1])) return 3;
    const pw_op_kernels *ops = &pw_active()->ops;
    static const int64_t lengths[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 63, 100, 1023, 1024, 1025, MOST};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; ++i) {
        elementwise(ops, lengths[i]);
        reductions(ops, lengths[i]);
        centred(ops, lengths[i]);
        turns(ops, lengths[i]);
    }
    for (int32_t rows = 1; rows <= 26; rows += rows < 8 ? 1 : 6) {
        for (int32_t format = 0; format < PW_KV_FORMATS; ++format) {
            attends(ops, 64, format, rows);
            attends(ops, 80, format, rows);
        }
    }
    return 0;
}
