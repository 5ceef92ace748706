/* A forward step as a flat list of ops: how it is built, and the memory that it runs in. executor.h runs it.
 *
 * Built once per model (ops over arena offsets and packed weights), then run with a step: which tokens, where their
 * keys and values go, which rows want logits. All memory is allocated when the program is sealed.
 *
 * A row's results depend on its sequence alone, bit for bit: not on the other rows of the step, on how the prompt was
 * cut into steps, or on the number of threads or ranks.
 *
 * Ranks are processes that run one step together over memory that all of them map: rows, logits, keys and values. Each
 * computes a range of panels of every weight and the attention of a range of KV heads, or a part of the query heads of one;
 * a barrier over all of them follows whatever another rank reads. Rank 0 says what to run, the others serve (orders.h). */
#ifndef PHASEWISE_PROGRAM_H
#define PHASEWISE_PROGRAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "group/division.h"
#include "group/group.h"
#include "memory/kv_layout.h"
#include "group/orders_region.h"
#include "team/product.h"
#include "program/schedule_table.h"

enum {
    PW_MAX_PARTS = 3,
    PW_MAX_KINDS = 4, /* of attention */
    PW_MAX_EXPERTS = 1024,
    PW_OWN_ROWS = 8, /* up to here each rank prepares all rows for itself, which is cheaper than a barrier over ranks */
};

typedef enum {
    PW_EMBED, PW_LINEAR, PW_ATTEND, PW_ADJUST, PW_ROUTE, PW_EXPERTS, PW_COMBINE,
    PW_HEADS, PW_CONVOLVE, PW_STATE_GATES, PW_RECUR, PW_GATE_ROWS, /* state/run_state.h */
    PW_LAYER_INPUTS, PW_STREAMS, /* state/streams.h */
    PW_INDEX, /* indexer/choose.h */
} pw_opcode;

/* What a product reads: rows as they are, rows normalised, gate(first half) * second half of a row, or act(row + bias).
 * With `with_stride`, a gate's second half is the step's row of another place. */
typedef enum { PW_FROM_ROWS, PW_FROM_NORM, PW_FROM_GATE, PW_FROM_ACTIVATION } pw_source;

/* Which rows an op computes. After the last layer's keys and values only rows that want logits matter: its attention
 * and what follows run on those, gathered from the step's rows into rows 0, 1, .. of their own. */
typedef enum { PW_EVERY_ROW, PW_GATHERED_ROWS, PW_LOGIT_ROWS } pw_rows;

/* A weight, and where in an output row its outputs begin. */
typedef struct {
    pw_weight weight;
    int64_t column;
} pw_part;

/* How the rows of an op are prepared for its weights: weights of equal form share prepared rows. */
typedef struct {
    int32_t count;
    pw_form forms[PW_MAX_PARTS];
    int32_t form_of[PW_MAX_PARTS]; /* of each weight: index into forms */
} pw_preparation;

/* What this rank computes of a part by one table: some of its panels as a weight of their own (n is 0: none). */
typedef struct {
    pw_weight weight;
    int64_t column;
    pw_schedules schedules;
} pw_column_share;

/* A mixture of experts. Its weights are one stack, expert below expert, whole panels each. */
typedef struct {
    int32_t count, chosen;
    int32_t normalised; /* weights are scores over the sum of those of the chosen, else scores */
    bool weighs_inputs; /* weights multiply what experts read, not what they give */
    int64_t n;          /* outputs of one expert */
} pw_experts;

/* The score of an expert: the softmax of its logit among all, or its logistic, or (SparseMixer, Liu et al. 2024) the softmax
 * among those that are not chosen before it and that are near it, the largest of them. */
typedef enum { PW_SOFTMAX, PW_LOGISTIC, PW_SPARSE_MIXER } pw_scores;

/* What PW_ROUTE chooses by. Experts lie in groups; those of
 * the `chosen_groups` best can be chosen, a group being as good as the sum of its `group_best` best scores. */
typedef struct {
    pw_scores scores;
    int32_t groups, chosen_groups, group_best;
    float scale;       /* of weights */
    const float *bias; /* [experts], added to scores where groups and experts are chosen; NULL: none */
    const float *factors; /* [experts], of the weights of the chosen; NULL: 1 */
} pw_choice;

/* Which experts compute which rows of a step; filled by PW_ROUTE. A pair is a row and one of its experts; pairs lie in
 * the order of their experts, and of one expert in the order of their rows. */
typedef struct {
    int32_t *expert;    /* [rows][chosen], the largest logit first */
    float *weight;      /* the same */
    int64_t *pair;      /* the same: where each lies */
    int64_t *first;     /* [experts + 1]: pairs [first[e], first[e + 1]) are expert e's */
    int32_t *expert_of; /* [pairs] */
    int32_t *busy;      /* experts that have rows, those with the most first */
    int32_t n_busy;
} pw_routes;

enum { PW_MAX_TARGETS = 3, PW_MAX_ADAPTERS = 256, PW_MAX_LOW_ROWS = 4096 };

/* Some columns of an op's output rows: y[column ..] += up (low[from ..] as its inputs). `column` is whole panels away from
 * the first column of the part that it lies in. */
typedef struct {
    int64_t column, from;
    pw_thin_weight up;
} pw_low_rank_target;

/* What an adapter (adapters/low_rank.h) adds to a linear op: A of all targets one below the other, and B of each. */
typedef struct {
    int32_t n_targets;   /* 0: this adapter leaves the op alone */
    pw_thin_weight down; /* [sum of ranks][k] */
    const float *scales; /* [sum of ranks]: of what it gives */
    pw_low_rank_target targets[PW_MAX_TARGETS];
} pw_low_rank;

/* Products by head: of each row, numbers [step h, step h + k) times the weight of head h, to [n h, n h + n). The weights are
 * one stack, head below head, whole panels each. */
typedef struct {
    int32_t count;
    int64_t step, n;
} pw_heads;

/* Latent attention: `in` has of each head what meets the first numbers of latent vectors. Of PW_INDEX `in` has the queries of
 * `step` heads, `query` their weights, `vector` the keys. */
typedef struct {
    int64_t query, query_stride; /* rows of queries; of each head, */
    int64_t step, at;            /* `step` after the one before, the pairs that are turned begin at number `at` */
    int64_t vector, vector_stride; /* rows of latent vectors before their norm, and of their pairs */
    const float *norm;           /* [latent] */
} pw_latent_op;

/* What ops of layers with a state have of their own (state/run_state.h). */
typedef struct {
    int64_t at;                    /* floats of a sequence's state before this op's */
    int64_t second, second_stride; /* rows that it reads or changes beside `in` */
    int32_t taps, heads, groups, key_dim, value_dim;
    int64_t query_at, key_at, value_at, factor_at;   /* columns of a row of `in` */
    const float *weights;                            /* [taps][k], or of a norm */
    const float *rates, *offsets, *skips;            /* [heads]; offsets [heads][key_dim] by_key */
    const float *query_scale, *key_scale;            /* [key_dim]; NULL: queries and keys stay as they are */
    float least, most;                               /* time step */
    bool gates_rows, silu, erases, norm_first, one_gate;
    bool by_key; /* a decay for each number of a head's key */
    bool tiled; /* head h has the queries and keys of group h % groups; else neighbours share a group */
} pw_state_op;

enum { PW_MAX_STREAMS = 8 };
typedef enum { PW_PREDICT, PW_CORRECT, PW_SPREAD, PW_MERGE } pw_streams_mode;

/* What PW_STREAMS does (state/streams.h). */
typedef struct {
    int32_t mode, count, active;
    int64_t at, stride, each;       /* rows of streams, and where the next stream of a row begins */
    int64_t to, to_stride;
    const float *router;            /* [count][k] */
    const float *coefficients;      /* [count count][count], or [count][count] */
    const float *scale;             /* [k], or NULL */
} pw_streams;

/* Offsets and strides are floats in the arena. */
typedef struct {
    int32_t code;
    int32_t source;
    int32_t epilogue;    /* pw_epilogue; of PW_COMBINE too */
    int32_t rows;        /* pw_rows */
    int32_t n_parts;
    pw_part parts[PW_MAX_PARTS];
    pw_column_share shares[PW_SCHEDULE_TABLES][PW_MAX_PARTS]; /* of linear ops */
    pw_preparation preparation;
    int64_t k;
    int64_t group;                        /* of PW_LAYER_INPUTS: numbers that are normalised together */
    int64_t in, in_stride, out, out_stride;
    int64_t residual, residual_stride;    /* gathered rows with PW_ADD: what the product is added to */
    const float *norm;                    /* [k], for PW_FROM_NORM */
    float eps;                            /* of that norm */
    float scale;                          /* of embeddings; of attention's scores; of gated rows without a norm; of
                                           * adjusted rows at last */
    float sparsity;                       /* PW_FROM_GATE: of first halves what lies so many deviations above their mean; 0: all */
    pw_streams streams;
    float cap;                            /* of attention's scores, or of adjusted rows: c tanh(x / c); 0: none */
    int32_t gate;                         /* number of PW_EACH_GATE or, for PW_FROM_ACTIVATION, of PW_EACH_ACTIVATION */
    const float *bias;                    /* [qkv columns] of attention; [k] of rows; [experts][n] */
    const float *norm_bias;               /* [k] of adjusted rows whose norm is a LayerNorm; else NULL */
    const float *positions, *segments;    /* added to embeddings: [program's positions][k], [2][k]; or NULL */
    int32_t layer, kind;                  /* attention: which layer, and which of the program's kinds */
    const float *q_norm, *k_norm, *sinks; /* [head_dim], [head_dim], [n_heads]; NULL where the model has none */
    const float *v_norm;                  /* [head_dim]: of values; NULL */
    bool norm_last;                       /* queries and keys are normalised behind their turn */
    bool only_reads;                      /* attention over what another layer keeps: rows have queries alone */
    bool keys_are_values;                 /* values are keys before their norm and rotation: rows have none */
    int64_t with, with_stride;            /* PW_FROM_GATE: rows of second halves; stride 0: they lie behind the first */
    const float *slopes;                  /* [n_heads]: a score loses this for each position between (ALiBi); NULL */
    const float *growth;                  /* [n_growth]: of (p + growth_shift) / growth_span multiplies queries at p; or NULL */
    int64_t n_growth, growth_span, growth_shift;
    pw_experts experts;                   /* of PW_ROUTE, PW_EXPERTS and PW_COMBINE */
    pw_choice choice;                     /* of PW_ROUTE */
    pw_heads heads;                       /* of PW_HEADS */
    pw_latent_op latent;                  /* of PW_ATTEND, where the shape is latent */
    pw_low_rank *low_rank;                /* linear: [PW_MAX_ADAPTERS] (low_rank.h), owned; NULL: no adapter changes it */
    float *tap;                           /* linear: rows [][k] as they enter the product are copied here; NULL: not */
    pw_state_op state;
} pw_op;

/* Where a layer's keys and values lie. */
typedef struct {
    int64_t offset; /* bytes before its first KV head */
    int32_t n_kv_heads, head_dim;
    const int32_t *copies; /* [n_kv_heads + 1]: copies before those of a KV head; once sealed */
    int64_t slots;
    bool in_rings;
} pw_layer_kv;

/* What layers differ in: what their tokens see, and how positions turn queries and keys. */
typedef struct {
    int64_t window;     /* positions seen, itself included; 0: all. Bidirectional: half of it on each side, and itself */
    bool in_chunks;     /* a token sees its own run of `window` positions alone; runs begin at multiples of it */
    int32_t half;       /* pairs that are turned, (i, half + i); 0: none */
    int32_t angles;     /* the first kind with the same rotation, which computes them for all */
    double *inv_freq;   /* [half], radians per position */
    double magnitude;   /* of cosines and sines */
    int32_t n_kv_heads, head_dim; /* at most the shape's */
} pw_attention_kind;

/* A share of attention's work: rows [first, first + count) of a slice, or as many chunks of its positions. */
typedef struct {
    int32_t slice;
    int32_t first, count;
} pw_piece;

/* How the attention of one kind of layers is cut. */
typedef struct {
    int64_t n_pieces;
    pw_piece *pieces;
    int64_t *first_part; /* [max_slices], when split: where the partial results of its chunks begin */
} pw_plan;

/* Filled by the caller up to `split`; the rest by pw_program_check (executor.h). */
typedef struct {
    int64_t n_tokens, n_slices, n_logit_rows;
    int32_t *tokens;      /* [max_tokens] */
    int64_t *logit_rows;  /* [max_logit_rows], ascending */
    pw_slice *slices;     /* [max_slices] */
    int32_t *runs;        /* [max_slices][pw_runs_each]: the tables of slices, in any order */
    pw_keep *keeps;       /* [max_tokens]: those of slices, in any order */
    bool split;           /* one token per slice: pieces are runs of chunks, merged afterwards */
    pw_plan plans[PW_MAX_KINDS]; /* by kind of attention when split; else all layers use the first */
    int64_t n_tail_pieces;
    pw_piece *tail_pieces; /* [max_logit_rows]: attention of the rows that want logits, when not split */
    int32_t tile_rows;    /* of attention */
    int64_t *positions;   /* [max_tokens] */
    int64_t *slots;       /* [max_tokens] */
    int64_t *ring_places; /* [max_tokens]: slots of layers that keep rings, counted from 0 */
    pw_slots *rings;      /* [max_slices], ascending */
    bool *is_state_taken; /* [state_places] */
    int64_t n_written;
    pw_slots *written;    /* [max_tokens], ascending: what the step writes */
} pw_step;

/* Rows of a step that have an adapter, by adapter and then by row. */
typedef struct {
    int64_t *rows;   /* [places]: which row each is */
    int64_t *first;  /* [adapters + 1]: places [first[a], first[a + 1]) are adapter a's */
} pw_adapted;

/* Rows on their way through low-rank products, one for each place; shared by ranks. */
typedef struct {
    bool is_used; /* by this step */
    pw_adapted adapted[2]; /* of all rows; of rows that want logits */
    float *taken, *low; /* as they enter the first product, and what it gives */
    int64_t taken_stride, low_stride;
    int64_t *in_order; /* [rows]: 0, 1, .. */
} pw_low_rows;

typedef struct {
    pw_shape shape;
    pw_capacity capacity;
    pw_division divisions[PW_SCHEDULE_TABLES];
    int32_t rank, n_ranks;     /* this process among those that share the memory */
    long patience_ns;          /* for one barrier over ranks */
    int32_t n_ops, ops_room;
    pw_op *ops;
    int32_t n_kinds;
    pw_attention_kind kinds[PW_MAX_KINDS];
    pw_layer_kv *layers;       /* [n_layers]; places are known once sealed */
    int32_t *copies;           /* of KV heads of all layers */
    int64_t ring_window;       /* the largest window of layers that keep rings; 0: none does */
    pw_experts experts;        /* the most of any op; count 0: none */
    pw_routes routes;
    int32_t n_adapters;
    pw_low_rows low;
    int64_t arena_floats;      /* what the ops use; angles and partials follow */
    int64_t logits;            /* arena offset of [max_logit_rows][outputs] */
    int64_t outputs;           /* numbers that a step gives for a row: the vocabulary's logits, or a hidden row */
    int64_t n_positions;       /* the most rows of a slice that have an embedding of their position; 0: any */
    bool bidirectional;        /* tokens see those after them: a slice is a whole sequence */
    pw_step step;
    char *shared;              /* where all ranks map it; NULL: everything is this process's own */
    pw_group *group;           /* in the shared memory, from here on */
    pw_orders *orders;
    char *rows, *memory, *kv;  /* pages; what is shared is not owned */
    int64_t state_floats;      /* of one sequence: what layers keep beside keys and values, which it lies behind */
    float *states;             /* [state_places][state_floats] */
    bool is_kv_given;          /* and so are keys and values in memory of the caller's */
    int64_t rows_bytes, memory_bytes, kv_bytes;
    float *arena, *partials;
    float *cosines[PW_MAX_KINDS], *sines[PW_MAX_KINDS]; /* [max_tokens][half] */
    char *pairs;               /* prepared rows of experts' products */
    int32_t *chosen;           /* [max_tokens][shape.chosen]: slots that rows see, by position, where an indexer chooses */
    float *index_scores;       /* [partial_room][PW_CHUNK], of a step that is split; shared by ranks, as those are */
    int64_t partial_room;      /* chunks that may be split off in one step */
    char *prepared[PW_MAX_PARTS];     /* by form: rows of a step */
    char *own_prepared[PW_MAX_PARTS]; /* up to PW_OWN_ROWS, which this rank prepares for itself */
    char *scratch;             /* [max_threads][scratch_bytes] */
    int64_t scratch_bytes;
    int64_t private_row_bytes; /* of one prepared row in scratch */
    float *split[PW_MAX_PARTS]; /* part sums of the products of one op; NULL where no weight is summed in parts */
    int64_t split_floats;       /* of each */
    pw_schedules attention[PW_SCHEDULE_TABLES]; /* by the most rows of a slice: pw_plan_attention */
    pw_ticket *tickets;        /* [n_ops][PW_MAX_PARTS] */
    pw_ticket *region_tickets; /* [2][PW_MAX_PARTS][max_threads]: an op uses one half, and clears the other */
    atomic_long *merged;       /* [kinds][max_slices][n_kv_heads] */
    atomic_llong progress;     /* of rank 0: pw_progress_of */
} pw_program;

/* Steps begun so far, and of how many layers the newest has stored all keys and values; one number, so that another
 * thread reads both at once. */
enum { PW_PROGRESS_LAYERS = 1 << 16 };
static inline long long pw_progress_of(pw_program *program) {
    return atomic_load_explicit(&program->progress, memory_order_acquire);
}

/* NULL when there is no memory for the bookkeeping. One rank; for others the caller sets `rank`, `n_ranks`,
 * `patience_ns` and, by pw_division_of, `divisions` before it adds ops. */
pw_program *pw_program_open(pw_shape shape, pw_capacity capacity);

/* Adds a kind of attention (its inv_freq is copied) and returns its number; -1 without memory or room for more. */
int32_t pw_program_kind(pw_program *program, pw_attention_kind kind);
void pw_program_close(pw_program *program);

/* A copy of `op` is appended; its forms are worked out here. False without memory. */
bool pw_program_add(pw_program *program, const pw_op *op);

/* Before the program is sealed: adapter `adapter` (from 1 on) of a linear op. A copy is kept. False without memory. */
bool pw_program_adapt(pw_program *program, int32_t op, int32_t adapter, const pw_low_rank *low_rank);

/* Bytes that the program runs in once it is sealed: rows, scratch and KV. */
int64_t pw_program_bytes(const pw_program *program);

/* Those of keys and values, and of states, also before it is sealed. */
int64_t pw_program_kv_bytes(const pw_program *program);

/* Those of them that ranks share. */
int64_t pw_program_shared_bytes(const pw_program *program);

/* Allocates what is not shared. `shared`: pw_program_shared_bytes that all ranks map, page-aligned, where there are
 * several; rank 0 has seen them zeroed and seals first. NULL: one rank. `kv`: whole pages, for the keys and
 * values of one rank; NULL: they are allocated too. False when the system refuses. */
bool pw_program_seal(pw_program *program, char *shared, char *kv);

/* Makes every page of the sealed program's memory exist, shared memory included, each near a member of the team that
 * may use it. PW_TEAM_OK, the team's failure (negative), or an errno. While no step runs. */
int pw_program_touch(pw_program *program, pw_team *team);

/* The shape as if all layers had these heads. */
static inline pw_shape pw_shape_with(const pw_program *program, int32_t n_kv_heads, int32_t head_dim) {
    pw_shape shape = program->shape;
    shape.n_kv_heads = n_kv_heads;
    shape.head_dim = head_dim;
    return shape;
}

/* Of all kinds of attention: the longest heads, and the fewest KV heads, which share the most queries. */
static inline pw_shape pw_widest_shape(const pw_program *program) {
    int32_t heads = program->shape.n_kv_heads;
    for (int32_t kind = 0; kind < program->n_kinds; ++kind)
        if (program->kinds[kind].n_kv_heads < heads) heads = program->kinds[kind].n_kv_heads;
    return pw_shape_with(program, heads, program->shape.head_dim);
}

/* Bytes of one KV head of a layer. */
static inline int64_t pw_layer_head_bytes(const pw_program *program, int64_t layer) {
    const pw_layer_kv *own = &program->layers[layer];
    pw_shape shape = pw_shape_with(program, own->n_kv_heads, own->head_dim);
    return own->slots * pw_slot_bytes_of(&shape, program->capacity.kv_format);
}

/* Copies that are kept of a KV head of so many: as many as ranks share it by the table by which most do. Latent vectors
 * have one, which all ranks read. */
int32_t pw_copies_of(const pw_program *program, int32_t n_kv_heads, int32_t kv_head);

/* One of the copies of a KV head of the sealed program. */
static inline pw_kv_head pw_kv_head_of(const pw_program *program, int64_t layer, int64_t kv_head, int64_t copy) {
    const pw_layer_kv *own = &program->layers[layer];
    char *begin = program->kv + own->offset + (own->copies[kv_head] + copy) * pw_layer_head_bytes(program, layer);
    pw_shape shape = pw_shape_with(program, own->n_kv_heads, own->head_dim);
    return pw_kv_head_in_memory(&shape, begin, own->slots, program->capacity.kv_format);
}

/* Slot of the first position of a chunk, in a layer. */
static inline int64_t pw_chunk_slot_in(const pw_program *program, int64_t layer, const pw_slice *slice, int64_t chunk) {
    if (!program->layers[layer].in_rings) return pw_chunk_slot(program->step.runs, slice, chunk);
    return slice->ring_base - program->capacity.kv_slots + chunk * PW_CHUNK % slice->ring_slots;
}

/* Whether a row at a position sees what an indexer has chosen, and not all. */
static inline bool pw_has_choice(const pw_program *program, int64_t position) {
    return program->shape.index && position >= program->shape.chosen;
}

/* The tickets of an op's products: [PW_MAX_PARTS][max_threads], and how many those are. */
static inline int64_t pw_region_ticket_count(const pw_program *program) {
    return PW_MAX_PARTS * (int64_t)program->capacity.max_threads;
}
pw_ticket *pw_region_tickets(const pw_program *program, int64_t op);

/* Counters of finished chunks: [kinds][max_slices][n_kv_heads] of them. */
static inline int64_t pw_merged_count(const pw_program *program) {
    return program->n_kinds * program->capacity.max_slices * program->shape.n_kv_heads;
}

/* Most rows that an op computes. */
static inline int64_t pw_most_rows(const pw_capacity *room) {
    return room->max_tokens > room->max_logit_rows ? room->max_tokens : room->max_logit_rows;
}

#endif
