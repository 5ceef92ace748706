# C declarations of flat programs: their table of operations, executor and orders. Textually included by _native.pyx.


cdef extern from "program/schedule_table.h" nogil:
    enum:
        PW_SCHEDULE_TABLES, PW_MAX_ROW_RANGES

    ctypedef struct pw_row_range:
        int64_t last_rows
        bint tuned
        pw_schedule schedule

    ctypedef struct pw_schedules:
        pw_row_range *ranges

    bint pw_schedules_replace(pw_schedules *schedules, int32_t count, const pw_row_range *ranges)
    pw_schedule pw_schedule_for(const pw_schedules *schedules, const pw_weight *weight, int64_t rows, int threads)


cdef extern from "program/program.h" nogil:
    enum:
        PW_MAX_PARTS, PW_MAX_KINDS, PW_MAX_EXPERTS
        PW_MAX_STREAMS, PW_PREDICT, PW_CORRECT, PW_SPREAD, PW_MERGE
        PW_PROGRESS_LAYERS

    ctypedef enum pw_opcode:
        PW_EMBED, PW_LINEAR, PW_ATTEND, PW_INDEX, PW_ADJUST, PW_ROUTE, PW_EXPERTS, PW_COMBINE, PW_HEADS
        PW_CONVOLVE, PW_STATE_GATES, PW_RECUR, PW_GATE_ROWS, PW_LAYER_INPUTS, PW_STREAMS

    ctypedef enum pw_source:
        PW_FROM_ROWS, PW_FROM_NORM, PW_FROM_GATE, PW_FROM_ACTIVATION

    ctypedef enum pw_rows:
        PW_EVERY_ROW, PW_GATHERED_ROWS, PW_LOGIT_ROWS

    ctypedef struct pw_part:
        pw_weight weight
        int64_t column

    ctypedef struct pw_column_share:
        pw_weight weight
        int64_t column
        pw_schedules schedules

    ctypedef struct pw_experts:
        int32_t count, chosen, normalised
        bint weighs_inputs
        int64_t n

    ctypedef enum pw_scores:
        PW_SOFTMAX, PW_LOGISTIC, PW_SPARSE_MIXER

    ctypedef struct pw_choice:
        pw_scores scores
        int32_t groups, chosen_groups, group_best
        float scale
        const float *bias
        const float *factors

    ctypedef struct pw_heads:
        int32_t count
        int64_t step, n

    ctypedef struct pw_latent_op:
        int64_t query, query_stride, step, at, vector, vector_stride
        const float *norm

    ctypedef struct pw_state_op:
        int64_t at, second, second_stride, query_at, key_at, value_at, factor_at
        int32_t taps, heads, groups, key_dim, value_dim
        const float *weights
        const float *rates
        const float *offsets
        const float *skips
        const float *query_scale
        const float *key_scale
        float least, most
        bint gates_rows, silu, erases, norm_first, one_gate, by_key, tiled

    ctypedef struct pw_streams:
        int32_t mode, count, active
        int64_t at, stride, each, to, to_stride
        const float *router
        const float *coefficients
        const float *scale

    ctypedef struct pw_op:
        pw_streams streams
        int32_t code, source, epilogue, rows, n_parts, gate, layer, kind
        pw_part parts[PW_MAX_PARTS]
        pw_column_share shares[PW_SCHEDULE_TABLES][PW_MAX_PARTS]
        int64_t k, out_stride, in_stride, residual, residual_stride, group, n_growth, growth_span, growth_shift
        int64_t in_at "in"
        int64_t out_at "out"
        const float *norm
        float eps, scale, cap, sparsity
        const float *bias
        const float *norm_bias
        const float *positions
        const float *segments
        const float *q_norm
        const float *k_norm
        const float *sinks
        const float *v_norm
        bint norm_last, only_reads, keys_are_values
        int64_t second_at "with", second_stride "with_stride"
        const float *slopes
        const float *growth
        pw_experts experts
        pw_choice choice
        pw_heads heads
        pw_latent_op latent
        float *tap
        pw_state_op state

    ctypedef struct pw_attention_kind:
        int64_t window
        bint in_chunks
        int32_t half
        double *inv_freq
        double magnitude
        int32_t n_kv_heads, head_dim

    ctypedef struct pw_shape:
        int32_t n_layers, n_heads, n_kv_heads, head_dim, latent, index
        int64_t chosen, hidden, ffn, vocab
        float norm_eps

    ctypedef struct pw_capacity:
        int64_t kv_slots, ring_slots, max_tokens, max_slices, max_logit_rows, state_places
        int32_t kv_format, max_threads

    ctypedef struct pw_slice:
        int64_t first_row, n_rows, start, slot_base, first_run, n_runs, second, ring_base, ring_slots, adapter, state
        int64_t first_keep, n_keeps

    ctypedef struct pw_keep:
        int64_t n_rows, place

    ctypedef struct pw_step:
        int64_t n_tokens, n_slices, n_logit_rows
        int32_t *tokens
        int64_t *logit_rows
        pw_slice *slices
        int32_t *runs
        pw_keep *keeps

    ctypedef struct pw_layer_kv:
        int32_t n_kv_heads

    ctypedef struct pw_division:
        int32_t ranks, own_threads

    ctypedef struct pw_program:
        pw_shape shape
        pw_capacity capacity
        pw_division divisions[PW_SCHEDULE_TABLES]
        int32_t rank, n_ranks
        long patience_ns
        char *shared
        char *kv
        char *rows
        char *memory
        pw_group *group
        int32_t n_ops, n_kinds
        pw_attention_kind kinds[PW_MAX_KINDS]
        pw_op *ops
        pw_layer_kv *layers
        int64_t arena_floats, logits, outputs, n_positions
        bint bidirectional
        pw_step step
        float *arena
        pw_schedules attention[PW_SCHEDULE_TABLES]
        int64_t kv_bytes, rows_bytes, memory_bytes, state_floats

    pw_program *pw_program_open(pw_shape shape, pw_capacity capacity)
    int32_t pw_program_kind(pw_program *program, pw_attention_kind kind)
    void pw_program_close(pw_program *program)
    bint pw_program_add(pw_program *program, const pw_op *op)
    pw_division pw_division_of(int32_t ranks, const int32_t *threads, const int32_t *weights, int32_t rank)
    int64_t pw_runs_each(const pw_capacity *room)
    int64_t pw_layer_head_bytes(const pw_program *program, int64_t layer)
    int32_t pw_copies_of(const pw_program *program, int32_t n_kv_heads, int32_t kv_head)
    pw_kv_head pw_kv_head_of(const pw_program *program, int64_t layer, int64_t kv_head, int64_t copy)
    int64_t pw_program_kv_bytes(const pw_program *program)
    int64_t pw_program_bytes(const pw_program *program)
    int64_t pw_program_shared_bytes(const pw_program *program)
    long long pw_progress_of(pw_program *program)
    bint pw_program_seal(pw_program *program, char *shared, char *kv)
    int pw_program_touch(pw_program *program, pw_team *team)


cdef extern from "program/attend.h" nogil:
    pw_schedule pw_default_attention(const pw_shape *shape, int64_t tokens, int64_t chunks, int threads)


cdef extern from "program/executor.h" nogil:
    enum:
        PW_RUN_GROUP_FAILED, PW_RUN_LATE, PW_RUN_MISFIT

    const char *pw_program_check(pw_program *program, int threads, int32_t table)
    int pw_program_run(pw_program *program, pw_team *team, int32_t table)


cdef extern from "program/move_kv.h" nogil:
    int pw_program_copy_states(pw_program *program, pw_team *team, int64_t source, int64_t target, int64_t places)
    int pw_program_copy_kv(pw_program *program, pw_team *team, int64_t source, int64_t target, int64_t slots)


cdef extern from "program/orders.h" nogil:
    enum:
        PW_OBSERVED_THREADS, PW_SERVED, PW_SERVE_ORPHANED

    void pw_orders_open(pw_program *program)
    bint pw_orders_fit(const pw_program *program, const char *shared)
    int pw_orders_run(pw_program *program, pw_team *team, int32_t table, pw_team *resting)
    void pw_orders_stop(pw_program *program)
    int pw_orders_serve(pw_program *program, pw_team **teams)
    const int32_t *pw_orders_observed(const pw_program *program, int32_t table, int32_t rank)
    int64_t pw_orders_misplaced(const pw_program *program, int32_t table, int32_t rank)
