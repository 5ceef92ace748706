#include "program/attend_scratch.h"

enum { BLOCK_ROWS = 96 }; /* query rows that share one widened chunk of keys */

int64_t pw_block_tokens(const pw_shape *shape) {
    int64_t tokens = BLOCK_ROWS / pw_group_of(shape);
    return tokens < 1 || shape->index ? 1 : tokens; /* each token has its own choice */
}

/* Carves the scratch out of `memory`; returns the floats used. */
static int64_t carve(const pw_shape *shape, float *memory, pw_attend_scratch *w) {
    int64_t rows = pw_block_tokens(shape) * pw_group_of(shape), at = 0;
    if (rows < BLOCK_ROWS) rows = BLOCK_ROWS; /* a rank with some of a group's heads has more tokens to a block */
    int64_t padded = (rows + 15) / 16 * 16, values = rows * pw_value_dim_of(shape);
    w->first = (int64_t *)(memory + at), at += 2 * padded;
    w->last = (int64_t *)(memory + at), at += 2 * padded;
    w->positions = (int64_t *)(memory + at), at += 2 * padded;
    w->slopes = memory + at, at += padded;
    w->q = memory + at, at += shape->latent ? padded * shape->head_dim : rows * PW_ROW_STRIDE;
    w->part = (pw_partial){memory + at, memory + at + padded, memory + at + 2 * padded}, at += 2 * padded + values;
    w->into = (pw_partial){memory + at, memory + at + padded, memory + at + 2 * padded}, at += 2 * padded + values;
    w->chunk = memory + at, at += shape->latent ? pw_latent_scratch(padded) : pw_attention_scratch(shape->head_dim);
    return at;
}

int64_t pw_attend_scratch_floats(const pw_shape *shape) {
    static float nothing[1];
    pw_attend_scratch measured;
    return carve(shape, nothing, &measured);
}

pw_attend_scratch pw_attend_scratch_in(const pw_shape *shape, float *memory) {
    pw_attend_scratch scratch;
    carve(shape, memory, &scratch);
    return scratch;
}
