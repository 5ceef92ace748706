/* Rows and attention by the kernels named in argv[1], on the operands of stdin, for a machine that is not this one.
 * stdin: int64 n (even), rows, head_dim, positions; x, y, w float32 [n]; q [rows][head_dim], keys and values
 * [positions][head_dim]. stdout: float32, [n] of each row operation in the order below; then, for each format of keys and
 * values, [rows][head_dim]: row r sees all but the last rows - 1 - r positions. Exit status 3: those kernels do not run here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"

static float *read_floats(int64_t count) {
    float *place = malloc((size_t)count * sizeof *place + 64);
    if (!place || fread(place, sizeof *place, (size_t)count, stdin) != (size_t)count) exit(1);
    return place;
}

static void say(int64_t count, const float *x) {
    if (fwrite(x, sizeof *x, (size_t)count, stdout) != (size_t)count) exit(1);
}

static void row_operations(const pw_op_kernels *ops, int64_t n) {
    float *x = read_floats(n), *y = read_floats(n), *w = read_floats(n), *out = calloc((size_t)n, sizeof *out);
    const pw_norm norm = {w, y, 1e-5f};
    const pw_turn turn = {y, w, 1.0f};
    ops->rmsnorm(n, x, w, 1e-5f, out), say(n, out);
    ops->layernorm(n, x, y, &norm, out), say(n, out);
    ops->exponential(n, x, out), say(n, out);
    ops->softmax(n, x, out), say(n, out);
    ops->cap(n, 30.0f, x, out), say(n, out);
    for (int act = 0; act < PW_ACTIVATIONS; ++act) ops->activations[act](n, x, y, out), say(n, out);
    for (int gate = 0; gate < PW_GATES; ++gate) ops->gates[gate](n, x, w, out), say(n, out);
    memcpy(out, x, (size_t)n * sizeof *x);
    ops->rope(n / 2, &turn, out, out), say(n, out);
}

static void attend(const pw_op_kernels *ops, int32_t format, int64_t rows, int32_t dim, int64_t positions, const float *q,
                   const float *keys, const float *values) {
    int64_t chunks = (positions + PW_CHUNK - 1) / PW_CHUNK, slots = chunks * PW_CHUNK, value_dim = pw_value_dim(dim);
    pw_kv_head head = pw_kv_head_at(calloc((size_t)slots, (size_t)pw_kv_slot_bytes(format, dim)), slots, format, dim);
    float *padded = calloc((size_t)rows * PW_ROW_STRIDE, 4), *out = calloc((size_t)dim, 4);
    int64_t *first = calloc((size_t)rows, 8), *last = calloc((size_t)rows, 8);
    for (int64_t p = 0; p < positions; ++p) {
        ops->store_key(&head, p, keys + p * dim);
        ops->store_value(&head, p, values + p * dim);
    }
    for (int64_t r = 0; r < rows; ++r) {
        last[r] = positions - rows + r;
        memcpy(padded + r * PW_ROW_STRIDE, q + r * dim, (size_t)dim * 4);
    }
    pw_queries queries = {.q = padded, .first = first, .last = last, .rows = (int32_t)rows};
    pw_partial part = {calloc((size_t)rows + 16, 4), calloc((size_t)rows + 16, 4), calloc((size_t)(rows * value_dim), 4)};
    pw_partial into = {calloc((size_t)rows + 16, 4), calloc((size_t)rows + 16, 4), calloc((size_t)(rows * value_dim), 4)};
    float *scratch = calloc((size_t)pw_attention_scratch(dim), 4);
    ops->prepare_queries(format, dim, (int32_t)rows, padded);
    ops->begin((int32_t)rows, (int32_t)value_dim, into);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        ops->attend_chunk(&head, &queries, chunk, chunk * PW_CHUNK, scratch, part);
        ops->merge((int32_t)rows, (int32_t)value_dim, part, into);
    }
    for (int64_t r = 0; r < rows; ++r) ops->finish(dim, into.sum[r], into.values + r * value_dim, out), say(dim, out);
}

int main(int argc, char **argv) {
    int64_t sizes[4];
    if (argc != 2 || pw_select(argv[1])) return 3;
    if (fread(sizes, sizeof *sizes, 4, stdin) != 4) return 1;
    const pw_op_kernels *ops = &pw_active()->ops;
    row_operations(ops, sizes[0]);
    int64_t rows = sizes[1], dim = sizes[2], positions = sizes[3];
    float *q = read_floats(rows * dim), *keys = read_floats(positions * dim), *values = read_floats(positions * dim);
    for (int32_t format = 0; format < PW_KV_FORMATS; ++format)
        attend(ops, format, rows, (int32_t)dim, positions, q, keys, values);
    return 0;
}
