/* Attention of a program: queries, keys and values from the fused projection to the weighted values.
 *
 * A step in which every slice has one token is split by (run of chunks of positions, KV head); the thread that finishes the
 * last chunk of a head merges them all in order. Any other step stores its keys and values first and is then split by
 * (block of rows, KV head). Both do the same arithmetic in the same order for a row (families/attention.c).
 *
 * Positions lie in runs of PW_CHUNK slots: one behind the other, or where a slice's table says. Sixteen slots share a
 * panel of keys. Where a sequence does not begin on a multiple of 16, a thread may read a panel while another stores a
 * key into it for other positions: those lanes of the scores are thrown away. */
#include <string.h>

#include "program/attend.h"

/* ---- planning --------------------------------------------------------------------------------------------------- */

static int64_t first_seen(const pw_program *program, int32_t kind, int64_t position) {
    int64_t window = program->kinds[kind].window, before = program->bidirectional ? window / 2 : window - 1;
    if (program->kinds[kind].in_chunks) return position / window * window;
    return window > 0 && position > before ? position - before : 0;
}

/* end: the last position of the slice. */
static int64_t last_seen(const pw_program *program, int32_t kind, int64_t position, int64_t end) {
    int64_t window = program->kinds[kind].window;
    if (!program->bidirectional) return position;
    return window > 0 && position + window / 2 < end ? position + window / 2 : end;
}

typedef struct {
    int64_t first, count;
} run_of_chunks;

static int64_t chosen_chunks(const pw_program *program) { return (program->shape.chosen + PW_CHUNK - 1) / PW_CHUNK; }

/* The chunks that a slice of one token sees. */
static run_of_chunks chunks_of(const pw_program *program, int32_t kind, int64_t slice) {
    int64_t position = program->step.slices[slice].start;
    if (pw_has_choice(program, position)) return (run_of_chunks){0, chosen_chunks(program)};
    int64_t first = first_seen(program, kind, position) / PW_CHUNK;
    return (run_of_chunks){first, position / PW_CHUNK - first + 1};
}

static int64_t all_chunks(const pw_program *program, int32_t kind) {
    int64_t all = 0;
    for (int64_t s = 0; s < program->step.n_slices; ++s) all += chunks_of(program, kind, s).count;
    return all;
}

static bool plan_chunks(pw_program *program, int32_t kind, int64_t positions) {
    pw_step *step = &program->step;
    pw_plan *plan = &step->plans[kind];
    int64_t parts = 0, chunks_each = positions < PW_CHUNK ? 1 : positions / PW_CHUNK;
    plan->n_pieces = 0;
    for (int64_t s = 0; s < step->n_slices; ++s) {
        run_of_chunks seen = chunks_of(program, kind, s);
        plan->first_part[s] = parts;
        parts += seen.count;
        if (parts > program->partial_room) return false;
        for (int64_t done = 0, count; done < seen.count; done += count) {
            count = seen.count - done < chunks_each ? seen.count - done : chunks_each;
            plan->pieces[plan->n_pieces++] = (pw_piece){(int32_t)s, (int32_t)(seen.first + done), (int32_t)count};
        }
    }
    return true;
}

/* Tokens of a block: enough blocks for every thread, if that leaves a full tile of rows in each. */
static int64_t fair_tokens(const pw_shape *shape, int64_t n_tokens, int threads) {
    int64_t most = pw_block_tokens(shape), group = pw_group_of(shape), least = (PW_TILE_ROWS + group - 1) / group;
    int64_t fair = n_tokens * shape->n_kv_heads / (4 * threads);
    if (fair < least) fair = least;
    return fair < most ? fair : most;
}

/* Long pieces of work first: late blocks see more positions. */
static void plan_blocks(pw_program *program, int64_t tokens) {
    const pw_step *step = &program->step;
    pw_plan *plan = &program->step.plans[0];
    plan->n_pieces = 0;
    for (int64_t s = step->n_slices - 1; s >= 0; --s) {
        int64_t rows = step->slices[s].n_rows;
        for (int64_t end = rows; end > 0;) {
            int64_t count = end % tokens ? end % tokens : tokens;
            end -= count;
            plan->pieces[plan->n_pieces++] = (pw_piece){(int32_t)s, (int32_t)end, (int32_t)count};
        }
    }
}

/* Blocks of neighbouring rows that want logits. */
static void plan_tail(pw_step *step, int64_t tokens) {
    int32_t slice = 0;
    step->n_tail_pieces = 0;
    for (int64_t i = 0; i < step->n_logit_rows; ++i) {
        while (step->logit_rows[i] >= step->slices[slice].first_row + step->slices[slice].n_rows) ++slice;
        int32_t row = (int32_t)(step->logit_rows[i] - step->slices[slice].first_row);
        pw_piece *last = step->n_tail_pieces ? &step->tail_pieces[step->n_tail_pieces - 1] : NULL;
        if (last && last->slice == slice && last->first + last->count == row && last->count < tokens)
            last->count += 1;
        else
            step->tail_pieces[step->n_tail_pieces++] = (pw_piece){slice, row, 1};
    }
}

/* Tokens of a block to which a schedule gives this number of rows. */
static int64_t block_of(const pw_shape *shape, const pw_schedule *schedule) {
    int64_t tokens = schedule->block_m / pw_group_of(shape), most = pw_block_tokens(shape);
    return tokens < 1 ? 1 : tokens < most ? tokens : most;
}

static int64_t most_slice_rows(const pw_step *step) {
    int64_t most = 0;
    for (int64_t s = 0; s < step->n_slices; ++s)
        if (step->slices[s].n_rows > most) most = step->slices[s].n_rows;
    return most;
}

/* A piece loads its queries anew, so that it takes several chunks where there are enough for every thread. */
pw_schedule pw_default_attention(const pw_shape *shape, int64_t tokens, int64_t chunks, int threads) {
    int64_t chunks_each = chunks * shape->n_kv_heads / (8 * threads);
    pw_schedule s = {.mr = PW_TILE_ROWS, .panels = 1, .block_n = PW_PANEL, .threads_m = 1, .threads_n = threads, .threads_k = 1};
    s.block_m = (int32_t)(fair_tokens(shape, tokens, threads) * pw_group_of(shape));
    s.block_k = (int32_t)((chunks_each < 1 ? 1 : chunks_each) * PW_CHUNK);
    return s;
}

/* What this rank has of heads of this shape. Ranks share latent vectors, which are the keys of all heads, and divide the
 * heads. */
static pw_head_share heads_of_rank(const pw_division *division, const pw_shape *shape) {
    if (!shape->latent) return pw_heads_of(division, shape->n_kv_heads, pw_group_of(shape));
    pw_range heads = pw_share_of(division, shape->n_heads);
    return (pw_head_share){{0, heads.end > heads.begin}, (int32_t)heads.begin, (int32_t)(heads.end - heads.begin), 0, 1};
}

/* The shape as if this rank's KV heads, and its query heads, were all; never without any. No kind of attention has more
 * query heads to a KV head. */
static pw_shape shape_of_rank(const pw_program *program, int32_t table) {
    pw_shape shape = pw_widest_shape(program);
    const pw_division *division = &program->divisions[table];
    pw_head_share own = heads_of_rank(division, &shape);
    int32_t group = own.count < 1 ? 1 : own.count;
    for (int32_t kind = 0; kind < program->n_kinds; ++kind) {
        pw_shape of_kind = pw_shape_with(program, program->kinds[kind].n_kv_heads, program->kinds[kind].head_dim);
        int32_t count = heads_of_rank(division, &of_kind).count;
        if (count > group) group = count;
    }
    shape.n_kv_heads = own.kv_heads.end > own.kv_heads.begin ? (int32_t)(own.kv_heads.end - own.kv_heads.begin) : 1;
    shape.n_heads = group * shape.n_kv_heads;
    return shape;
}

void pw_plan_attention(pw_program *program, int threads, int32_t table) {
    pw_step *step = &program->step;
    pw_shape of_rank = shape_of_rank(program, table), *shape = &of_rank;
    const pw_schedule *tuned = pw_tuned(&program->attention[table], most_slice_rows(step));
    int64_t chunks = step->split ? all_chunks(program, 0) : 0;
    pw_schedule whole = tuned ? *tuned : pw_default_attention(shape, step->n_tokens, chunks, threads);
    pw_schedule tail = tuned ? *tuned : pw_default_attention(shape, step->n_logit_rows, 0, threads);
    step->tile_rows = whole.mr;
    for (int32_t kind = 0; kind < program->n_kinds && step->split; ++kind) {
        pw_schedule own = tuned ? *tuned : pw_default_attention(shape, 1, all_chunks(program, kind), threads);
        step->split = plan_chunks(program, kind, own.block_k);
    }
    if (step->split) return;
    plan_blocks(program, block_of(shape, &whole));
    plan_tail(step, block_of(shape, &tail));
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const pw_run *run;
    const pw_op *op;
    pw_shape shape; /* of the op's kind */
    pw_attend_scratch work;
    pw_head_share own; /* this rank's */
} attending;

/* Which of all query heads is number i of those that this rank has of a KV head. */
static int64_t query_head(const attending *a, int64_t kv_head, int32_t i) {
    return kv_head * pw_group_of(&a->shape) + a->own.first + i;
}

/* The copy of a KV head that this rank reads. */
static pw_kv_head read_head(const attending *a, int64_t kv_head) {
    return pw_kv_head_of(a->run->program, a->op->layer, kv_head, a->own.copy);
}

/* A head of the projection with its bias: where it lies, or in `out` where there is one to add. */
static const float *biased_head(const attending *a, int64_t row, int64_t column, float *out) {
    const pw_program *program = a->run->program;
    const float *x = program->arena + a->op->in + row * a->op->in_stride + column;
    if (!a->op->bias) return x;
    memcpy(out, x, sizeof(float) * (size_t)a->shape.head_dim);
    a->run->kernels->ops.add(a->shape.head_dim, a->op->bias + column, out);
    return out;
}

/* A query or key with its norm (which may be NULL) and its rotation, times `factor`. */
static void turned_head(const attending *a, int64_t row, int64_t column, const float *norm, float factor, float *out) {
    const pw_program *program = a->run->program;
    const pw_op_kernels *ops = &a->run->kernels->ops;
    int32_t dim = a->shape.head_dim, turned = 2 * program->kinds[a->op->kind].half;
    bool norm_last = norm && a->op->norm_last;
    float by = norm_last ? 1.0f : factor;
    const float *x = biased_head(a, row, column, out);
    if (norm && !norm_last) ops->rmsnorm(dim, x, norm, program->shape.norm_eps, out);
    if (norm && !norm_last) x = out;
    if (turned < dim && x != out) memcpy(out + turned, x + turned, sizeof(float) * (size_t)(dim - turned));
    if (turned < dim && by != 1.0f) ops->scale(dim - turned, by, out + turned);
    if (turned > 0) pw_turn_row(a->run, a->op, row, by, x, out);
    if (norm_last) ops->rmsnorm(dim, out, norm, program->shape.norm_eps, out);
    if (norm_last && factor != 1.0f) ops->scale(dim, factor, out);
}

/* The latent vector of a row, normalised, and its pairs turned. */
static void store_latent(const attending *a, int64_t row) {
    const pw_program *program = a->run->program;
    const pw_op_kernels *ops = &a->run->kernels->ops;
    const pw_latent_op *latent = &a->op->latent;
    const int64_t *slots = program->layers[a->op->layer].in_rings ? program->step.ring_places : program->step.slots;
    const float *vector = program->arena + latent->vector + row * latent->vector_stride;
    pw_kv_head head = read_head(a, 0);
    float x[PW_MAX_LATENT_DIM];
    ops->rmsnorm(head.value_dim, vector, latent->norm, a->op->eps, x);
    pw_turn_row(a->run, a->op, row, 1.0f, vector + head.value_dim, x + head.value_dim);
    ops->store_value(&head, slots[row], x);
}

/* Into this rank's copy, and by the last of those that share a KV head into the copies that none of them reads now. */
static void store_row(const attending *a, int64_t row, int64_t kv_head) {
    const pw_program *program = a->run->program;
    const pw_shape *shape = &a->shape;
    const pw_op_kernels *ops = &a->run->kernels->ops;
    float x[PW_MAX_HEAD_DIM];
    if (a->op->only_reads) return;
    if (shape->latent) {
        store_latent(a, row);
        return;
    }
    const pw_layer_kv *layer = &program->layers[a->op->layer];
    int64_t slot = layer->in_rings ? program->step.ring_places[row] : program->step.slots[row], dim = shape->head_dim;
    int32_t copies = layer->copies[kv_head + 1] - layer->copies[kv_head];
    int32_t first = a->own.copy, end = first + 1 < a->own.sharers ? first + 1 : copies;
    turned_head(a, row, (shape->n_heads + kv_head) * dim, a->op->k_norm, 1.0f, x);
    for (int32_t copy = first; copy < end; ++copy) {
        pw_kv_head head = pw_kv_head_of(program, a->op->layer, kv_head, copy);
        ops->store_key(&head, slot, x);
    }
    int64_t before = shape->n_heads + (a->op->keys_are_values ? 0 : shape->n_kv_heads);
    const float *value = biased_head(a, row, (before + kv_head) * dim, x);
    if (a->op->v_norm) ops->rmsnorm(dim, value, a->op->v_norm, program->shape.norm_eps, x);
    for (int32_t copy = first; copy < end; ++copy) {
        pw_kv_head head = pw_kv_head_of(program, a->op->layer, kv_head, copy);
        ops->store_value(&head, slot, a->op->v_norm ? x : value);
    }
}

/* What queries at a position are multiplied by. */
static float query_factor(const pw_op *op, int64_t position) {
    if (!op->growth) return op->scale;
    int64_t step = (position + op->growth_shift) / op->growth_span;
    return op->scale * op->growth[step < op->n_growth ? step : op->n_growth - 1];
}

/* A query of latent attention: what meets the vectors, and its pairs turned, times the scale of scores. */
static void latent_query(const attending *a, int64_t row, int64_t head, float *x) {
    const pw_program *program = a->run->program;
    const pw_latent_op *latent = &a->op->latent;
    const float *pairs = program->arena + latent->query + row * latent->query_stride + head * latent->step + latent->at;
    int64_t dim = program->shape.latent;
    memcpy(x, program->arena + a->op->in + row * a->op->in_stride + head * dim, sizeof(float) * (size_t)dim);
    a->run->kernels->ops.scale(dim, a->op->scale, x);
    pw_turn_row(a->run, a->op, row, a->op->scale, pairs, x + dim);
}

/* A query as column n of those of a piece. */
static void load_query(const attending *a, int64_t row, int64_t head, int32_t n, int64_t padded) {
    const pw_program *program = a->run->program;
    const pw_shape *shape = &a->shape;
    if (!shape->latent) {
        float *q = a->work.q + (int64_t)n * PW_ROW_STRIDE;
        turned_head(a, row, head * shape->head_dim, a->op->q_norm,
                    query_factor(a->op, program->step.positions[row]), q);
        return;
    }
    float x[PW_MAX_LATENT_DIM];
    latent_query(a, row, head, x);
    for (int32_t i = 0; i < shape->head_dim - shape->index; ++i) a->work.q[i * padded + n] = x[i];
}

/* The queries of rows [first, first + tokens) of a slice that share a KV head. */
static pw_queries load_queries(const attending *a, const pw_slice *slice, int64_t first, int64_t tokens,
                               int64_t kv_head) {
    const pw_program *program = a->run->program;
    int64_t row = slice->first_row + first, end = slice->start + slice->n_rows - 1;
    const pw_shape *shape = &a->shape;
    int32_t group = a->own.count, n = 0;
    int64_t padded = (tokens * group + PW_PANEL - 1) / PW_PANEL * PW_PANEL;
    if (shape->latent && padded > tokens * group)
        memset(a->work.q, 0, sizeof(float) * (size_t)(padded * shape->head_dim));
    for (int64_t token = row; token < row + tokens; ++token)
        for (int32_t i = 0; i < group; ++i, ++n) {
            int64_t head = query_head(a, kv_head, i);
            load_query(a, token, head, n, padded);
            int64_t position = program->step.positions[token];
            a->work.last[n] = last_seen(program, a->op->kind, position, end);
            a->work.first[n] = first_seen(program, a->op->kind, position);
            a->work.positions[n] = position;
            a->work.slopes[n] = a->op->slopes ? a->op->slopes[head] : 0.0f;
        }
    if (!shape->latent)
        a->run->kernels->ops.prepare_queries(program->capacity.kv_format, shape->head_dim, n, a->work.q);
    bool has_choice = pw_has_choice(program, program->step.positions[row]);
    const int32_t *chosen = has_choice ? program->chosen + row * shape->chosen : NULL;
    return (pw_queries){.q = a->work.q, .chosen = chosen, .n_chosen = shape->chosen,
                        .first = a->work.first, .last = a->work.last, .rows = n,
                        .tile_rows = program->step.tile_rows, .cap = a->op->cap,
                        .slopes = a->op->slopes ? a->work.slopes : NULL, .positions = a->work.positions};
}

static void finish_rows(const attending *a, int64_t row, int64_t tokens, int64_t kv_head) {
    const pw_shape *shape = &a->shape;
    int32_t n = 0, dim = shape->latent ? shape->latent : shape->head_dim;
    for (int64_t token = row; token < row + tokens; ++token)
        for (int32_t i = 0; i < a->own.count; ++i, ++n) {
            float *out = a->run->program->arena + a->op->out + token * a->op->out_stride + query_head(a, kv_head, i) * dim;
            a->run->kernels->ops.finish(dim, a->work.into.sum[n],
                                        a->work.into.values + (int64_t)n * pw_value_dim_of(shape), out);
        }
}

/* ---- pieces ----------------------------------------------------------------------------------------------------- */

/* Nothing seen, or the sink of each head: a score whose weight counts and whose value is zero. */
static void begin_rows(const attending *a, int32_t rows, int64_t kv_head) {
    a->run->kernels->ops.begin(rows, pw_value_dim_of(&a->shape), a->work.into);
    if (!a->op->sinks) return;
    for (int32_t i = 0; i < rows; ++i) {
        a->work.into.top[i] = a->op->sinks[query_head(a, kv_head, i % a->own.count)];
        a->work.into.sum[i] = 1.0f;
    }
}

/* Where the keys of a chunk of a slice begin. */
static const void *keys_of(const attending *a, const pw_slice *slice, int64_t chunk, int64_t kv_head) {
    const pw_program *program = a->run->program;
    pw_kv_head head = read_head(a, kv_head);
    int64_t panel = pw_chunk_slot_in(program, a->op->layer, slice, chunk) / PW_PANEL;
    int64_t elements = pw_key_elements(&head);
    return (const char *)head.keys + panel * PW_PANEL * elements * pw_kv_element_bytes(head.format);
}

/* Queries as one chunk meets them. */
static pw_queries in_chunk(const pw_queries *queries, int64_t chunk) {
    pw_queries own = *queries;
    if (!own.chosen) return own;
    own.chosen += chunk * PW_CHUNK;
    own.n_chosen -= chunk * PW_CHUNK;
    if (own.n_chosen > PW_CHUNK) own.n_chosen = PW_CHUNK;
    return own;
}

/* Chunks [first, first + count) of loaded queries, merged in order and finished: all that tokens of a row see. After
 * them come the keys at `next`, if any. */
static void attend_whole(const attending *a, const pw_slice *slice, pw_queries *queries, int64_t first, int64_t count,
                         int64_t kv_head, const void *next) {
    const pw_program *program = a->run->program;
    const pw_op_kernels *ops = &a->run->kernels->ops;
    int32_t value_dim = pw_value_dim_of(&a->shape);
    pw_kv_head head = read_head(a, kv_head);
    begin_rows(a, queries->rows, kv_head);
    for (int64_t chunk = first; chunk < first + count; ++chunk) {
        int64_t slot = pw_chunk_slot_in(program, a->op->layer, slice, chunk);
        queries->next_keys = chunk + 1 < first + count ? keys_of(a, slice, chunk + 1, kv_head) : next;
        pw_queries own = in_chunk(queries, chunk);
        ops->attend_chunk(&head, &own, chunk, slot, a->work.chunk, a->work.part);
        ops->merge(queries->rows, value_dim, a->work.part, a->work.into);
    }
}

static void attend_block(const attending *a, const pw_piece *piece, int64_t kv_head) {
    const pw_slice *slice = &a->run->program->step.slices[piece->slice];
    int64_t row = slice->first_row + piece->first;
    pw_queries queries = load_queries(a, slice, piece->first, piece->count, kv_head);
    int64_t first = queries.first[0] / PW_CHUNK, last = queries.last[queries.rows - 1] / PW_CHUNK;
    if (queries.chosen) first = 0, last = chosen_chunks(a->run->program) - 1;
    attend_whole(a, slice, &queries, first, last - first + 1, kv_head, NULL);
    finish_rows(a, row, piece->count, kv_head);
}

/* Where a chunk of a slice that is split leaves one KV head's part. */
static pw_partial partial_of(const attending *a, int64_t part, int64_t kv_head) {
    const pw_program *program = a->run->program;
    const pw_shape *shape = &a->shape;
    int64_t heads = shape->n_heads, head = query_head(a, kv_head, 0);
    float *at = program->partials + part * pw_partial_floats(&program->shape);
    return (pw_partial){at + head, at + heads + head, at + 2 * heads + head * pw_value_dim_of(shape)};
}

static void merge_chunks(const attending *a, int32_t slice, int64_t n_chunks, int64_t kv_head) {
    const pw_program *program = a->run->program;
    const pw_op_kernels *ops = &a->run->kernels->ops;
    int32_t value_dim = pw_value_dim_of(&a->shape);
    const pw_plan *plan = &program->step.plans[a->op->kind];
    begin_rows(a, a->own.count, kv_head);
    for (int64_t i = 0; i < n_chunks; ++i)
        ops->merge(a->own.count, value_dim, partial_of(a, plan->first_part[slice] + i, kv_head), a->work.into);
}

/* A run of one token's chunks. The slot of the token itself is read with its last chunk alone. */
static void attend_chunks(const attending *a, const pw_piece *piece, int64_t kv_head, const void *next) {
    const pw_program *program = a->run->program;
    const pw_slice *slice = &program->step.slices[piece->slice];
    const pw_plan *plan = &program->step.plans[a->op->kind];
    run_of_chunks seen = chunks_of(program, a->op->kind, piece->slice);
    int64_t row = slice->first_row, before = piece->first - seen.first;
    if (before + piece->count == seen.count) store_row(a, row, kv_head);
    pw_queries queries = load_queries(a, slice, 0, 1, kv_head);
    if (piece->count == seen.count) {
        attend_whole(a, slice, &queries, seen.first, seen.count, kv_head, next);
        finish_rows(a, row, 1, kv_head);
        return;
    }
    pw_kv_head head = read_head(a, kv_head);
    for (int64_t i = 0; i < piece->count; ++i) {
        int64_t chunk = piece->first + i, part = plan->first_part[piece->slice] + before + i;
        queries.next_keys = i + 1 < piece->count ? keys_of(a, slice, chunk + 1, kv_head) : next;
        int64_t slot = pw_chunk_slot_in(program, a->op->layer, slice, chunk);
        pw_queries own = in_chunk(&queries, chunk);
        a->run->kernels->ops.attend_chunk(&head, &own, chunk, slot, a->work.chunk, partial_of(a, part, kv_head));
    }
    int64_t slot = a->op->kind * program->capacity.max_slices + piece->slice;
    atomic_long *merged = &program->merged[slot * program->shape.n_kv_heads + kv_head];
    long finished = atomic_fetch_add_explicit(merged, piece->count, memory_order_acq_rel) + piece->count;
    if (finished % seen.count) return; /* every layer of a kind adds as many as the slice sees */
    merge_chunks(a, piece->slice, seen.count, kv_head);
    finish_rows(a, row, 1, kv_head);
}

/* ---- a member's share ------------------------------------------------------------------------------------------- */

/* What members take from, by KV head of this rank and piece. */
typedef struct {
    const pw_piece *pieces;
    int64_t first_head, heads, count;
    atomic_long *next;
} portions;

static int64_t take(const portions *all) { return atomic_fetch_add_explicit(all->next, 1, memory_order_relaxed); }
static const pw_piece *piece_of(const portions *all, int64_t index) { return &all->pieces[index / all->heads]; }
static int64_t head_of(const portions *all, int64_t index) { return all->first_head + index % all->heads; }

/* Takes one portion ahead, whose keys are asked for while values are read. */
static void attend_split(const attending *a, const portions *all) {
    for (int64_t own = take(all), next; own < all->count; own = next) {
        next = take(all);
        const void *keys = NULL;
        if (next < all->count) {
            const pw_piece *piece = piece_of(all, next);
            keys = keys_of(a, &a->run->program->step.slices[piece->slice], piece->first, head_of(all, next));
        }
        attend_chunks(a, piece_of(all, own), head_of(all, own), keys);
    }
}

static void attend_blocks(const attending *a, const portions *all) {
    for (int64_t own; (own = take(all)) < all->count;) attend_block(a, piece_of(all, own), head_of(all, own));
}

static void store_rows(const attending *a, pw_range rows, pw_range kv_heads) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
        for (int64_t kv_head = kv_heads.begin; kv_head < kv_heads.end; ++kv_head) store_row(a, row, kv_head);
}

/* All rows of a step that is not split, before any is read. False: as pw_meet. */
static bool store_step(const attending *a, pw_range kv_heads, pw_run *run, int member) {
    int64_t rows = run->program->step.n_tokens;
    if (a->shape.latent) { /* of all heads, and so of all ranks */
        store_rows(a, pw_rows_of(run, rows, member), (pw_range){0, 1});
        return pw_meet(run, member);
    }
    store_rows(a, (pw_range){rows * member / run->threads, rows * (member + 1) / run->threads}, kv_heads);
    pw_team_barrier(run->team, member);
    return true;
}

void pw_run_attend(pw_run *run, const pw_op *op, int member) {
    pw_program *program = run->program;
    const pw_step *step = &program->step;
    const pw_attention_kind *kind = &program->kinds[op->kind];
    float *scratch = (float *)(program->scratch + member * program->scratch_bytes);
    pw_shape shape = pw_shape_with(program, kind->n_kv_heads, kind->head_dim), widest = pw_widest_shape(program);
    attending a = {run, op, shape, pw_attend_scratch_in(&widest, scratch), heads_of_rank(run->division, &shape)};
    pw_range own = a.own.kv_heads;
    bool tail = op->rows != PW_EVERY_ROW && !step->split;
    const pw_plan *plan = &step->plans[step->split ? op->kind : 0];
    int64_t kv_heads = own.end - own.begin, n_pieces = tail ? step->n_tail_pieces : plan->n_pieces;
    const portions all = {tail ? step->tail_pieces : plan->pieces, own.begin, kv_heads, n_pieces * kv_heads,
                          &program->tickets[(op - program->ops) * PW_MAX_PARTS].next};
    if (step->split) {
        attend_split(&a, &all);
        return;
    }
    if (!op->only_reads && !store_step(&a, own, run, member)) return;
    attend_blocks(&a, &all);
}
