/* The memory that one thread attends in, and that one chunk's unfinished sums take. */
#ifndef PHASEWISE_ATTEND_SCRATCH_H
#define PHASEWISE_ATTEND_SCRATCH_H

#include "memory/kv_layout.h"

typedef struct {
    float *q;
    int64_t *first, *last, *positions;
    float *slopes;
    pw_partial part, into;
    float *chunk;
} pw_attend_scratch;

/* Query heads that share a KV head; floats of a stored value; the most tokens of one block of queries. */
static inline int32_t pw_group_of(const pw_shape *shape) { return shape->n_heads / shape->n_kv_heads; }
static inline int32_t pw_value_dim_of(const pw_shape *shape) {
    return shape->latent ? shape->latent : (int32_t)pw_value_dim(shape->head_dim);
}
int64_t pw_block_tokens(const pw_shape *shape);

/* Floats of one thread's scratch. */
int64_t pw_attend_scratch_floats(const pw_shape *shape);

/* The scratch whose floats begin at `memory`. */
pw_attend_scratch pw_attend_scratch_in(const pw_shape *shape, float *memory);

/* Floats of one chunk's unfinished sums, all heads. */
static inline int64_t pw_partial_floats(const pw_shape *shape) {
    return (int64_t)shape->n_heads * (pw_value_dim_of(shape) + 2);
}

#endif
