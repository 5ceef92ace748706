#include "program/program.h"

#include <stdlib.h>
#include <string.h>

#include "program/attend_scratch.h"
#include "indexer/choose.h"
#include "memory/pages.h"

enum { PAGE = 4096 };

static int64_t whole_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* An array of zeros; false without memory. */
#define NEW(array, count) (((array) = calloc((size_t)(count), sizeof *(array))) != NULL)

/* ---- adapters --------------------------------------------------------------------------------------------------- */

bool pw_program_adapt(pw_program *program, int32_t op, int32_t adapter, const pw_low_rank *low_rank) {
    pw_op *adapted = &program->ops[op];
    if (!adapted->low_rank) adapted->low_rank = calloc(PW_MAX_ADAPTERS, sizeof *adapted->low_rank);
    if (!adapted->low_rank) return false;
    adapted->low_rank[adapter - 1] = *low_rank;
    program->n_adapters = (int32_t)larger(program->n_adapters, adapter);
    return true;
}

/* The longest row that enters a first product, and the most numbers that one gives, in whole lines. */
static void measure_low_rank(const pw_program *program, int64_t *taken, int64_t *low) {
    *taken = *low = 0;
    for (int32_t i = 0; i < program->n_ops; ++i)
        for (int32_t a = 0; program->ops[i].low_rank && a < program->n_adapters; ++a) {
            const pw_low_rank *own = &program->ops[i].low_rank[a];
            if (own->n_targets == 0) continue;
            *taken = larger(*taken, own->down.rank);
            *low = larger(*low, own->down.n);
        }
    *taken = pw_whole_lines(*taken * 4) / 4;
    *low = pw_whole_lines(*low * 4) / 4;
}

static int64_t low_rank_bytes(const pw_program *program) {
    int64_t taken, low;
    measure_low_rank(program, &taken, &low);
    return pw_most_rows(&program->capacity) * (taken + low) * (int64_t)sizeof(float);
}

static bool open_low_rank(pw_program *program, char *memory) {
    pw_low_rows *low = &program->low;
    int64_t rows = pw_most_rows(&program->capacity);
    if (program->n_adapters == 0) return true;
    measure_low_rank(program, &low->taken_stride, &low->low_stride);
    low->taken = (float *)memory;
    low->low = low->taken + rows * low->taken_stride;
    if (!NEW(low->in_order, rows)) return false;
    for (int64_t i = 0; i < rows; ++i) low->in_order[i] = i;
    for (int i = 0; i < 2; ++i)
        if (!NEW(low->adapted[i].rows, rows) || !NEW(low->adapted[i].first, program->n_adapters + 1)) return false;
    return true;
}

static void close_low_rank(pw_program *program) {
    free(program->low.in_order);
    for (int32_t i = 0; i < program->n_ops; ++i) free(program->ops[i].low_rank);
    for (int i = 0; i < 2; ++i) {
        free(program->low.adapted[i].rows);
        free(program->low.adapted[i].first);
    }
}

/* ---- building --------------------------------------------------------------------------------------------------- */

static bool open_step(pw_program *program) {
    const pw_capacity *room = &program->capacity;
    pw_step *step = &program->step;
    program->partial_room = room->kv_slots / PW_CHUNK + 2 * room->max_slices;
    return NEW(step->tokens, room->max_tokens) && NEW(step->positions, room->max_tokens) &&
           NEW(step->slots, room->max_tokens) && NEW(step->ring_places, room->max_tokens) &&
           NEW(step->written, room->max_tokens) && NEW(step->keeps, room->max_tokens) &&
           NEW(step->logit_rows, room->max_logit_rows) && NEW(step->tail_pieces, room->max_logit_rows) &&
           NEW(step->slices, room->max_slices) && NEW(step->rings, room->max_slices) &&
           NEW(step->runs, room->max_slices * pw_runs_each(room)) &&
           NEW(step->is_state_taken, larger(room->state_places, 1));
}

pw_program *pw_program_open(pw_shape shape, pw_capacity capacity) {
    pw_program *program = calloc(1, sizeof *program);
    if (!program) return NULL;
    program->shape = shape;
    program->capacity = capacity;
    program->n_ranks = 1;
    program->outputs = shape.vocab;
    for (int table = 0; table < PW_SCHEDULE_TABLES; ++table) program->divisions[table] = (pw_division){1, 0, 1, 1, 0, 0, 1, 1};
    if (!NEW(program->layers, shape.n_layers) || !open_step(program)) {
        pw_program_close(program);
        return NULL;
    }
    for (int32_t i = 0; i < shape.n_layers; ++i)
        program->layers[i] = (pw_layer_kv){.n_kv_heads = shape.n_kv_heads, .head_dim = shape.head_dim, .slots = capacity.kv_slots};
    return program;
}

static bool same_rotation(const pw_attention_kind *a, const pw_attention_kind *b) {
    return a->half == b->half && a->magnitude == b->magnitude &&
           memcmp(a->inv_freq, b->inv_freq, sizeof *a->inv_freq * (size_t)a->half) == 0;
}

int32_t pw_program_kind(pw_program *program, pw_attention_kind kind) {
    int32_t index = program->n_kinds;
    if (index == PW_MAX_KINDS) return -1;
    pw_attention_kind *added = &program->kinds[index];
    pw_plan *plan = &program->step.plans[index];
    *added = kind;
    program->n_kinds += 1; /* closed with the program, whatever is there of it */
    if (!NEW(added->inv_freq, larger(kind.half, 1)) || !NEW(plan->first_part, program->capacity.max_slices)) return -1;
    if (!NEW(plan->pieces, larger(program->capacity.max_tokens, program->partial_room))) return -1;
    memcpy(added->inv_freq, kind.inv_freq, sizeof *kind.inv_freq * (size_t)kind.half);
    added->angles = 0;
    while (!same_rotation(&program->kinds[added->angles], added)) added->angles += 1;
    return index;
}

/* What a step consists of, which the other ranks read where rank 0 writes it. */
static void free_what_is_told(pw_step *step) {
    free(step->tokens);
    free(step->logit_rows);
    free(step->slices);
    free(step->runs);
    free(step->keeps);
}

void pw_program_close(pw_program *program) {
    if (!program) return;
    pw_step *step = &program->step;
    close_low_rank(program);
    pw_pages_close(program->memory, program->memory_bytes);
    if (!program->shared) {
        pw_pages_close(program->rows, program->rows_bytes);
        if (!program->is_kv_given) pw_pages_close(program->kv, program->kv_bytes);
        free_what_is_told(step);
    }
    pw_routes *routes = &program->routes;
    void *owned[] = {program->ops,     program->tickets,  program->merged, program->region_tickets, step->positions,
                     step->slots,      step->tail_pieces, step->written,   routes->expert,          routes->weight,
                     routes->pair,     routes->first,     routes->busy,    routes->expert_of,       program->layers,
                     step->ring_places, step->rings,       step->is_state_taken, program->copies};
    for (int32_t kind = 0; kind < program->n_kinds; ++kind) {
        free(program->kinds[kind].inv_freq);
        free(step->plans[kind].first_part);
        free(step->plans[kind].pieces);
    }
    for (int table = 0; table < PW_SCHEDULE_TABLES; ++table) {
        free(program->attention[table].ranges);
        for (int32_t i = 0; i < program->n_ops; ++i)
            for (int32_t part = 0; part < program->ops[i].n_parts; ++part)
                free(program->ops[i].shares[table][part].schedules.ranges);
    }
    for (size_t i = 0; i < sizeof owned / sizeof *owned; ++i) free(owned[i]);
    free(program);
}

static int32_t form_index(pw_preparation *preparation, pw_form form) {
    for (int32_t i = 0; i < preparation->count; ++i)
        if (memcmp(&preparation->forms[i], &form, sizeof form) == 0) return i;
    preparation->forms[preparation->count] = form;
    return preparation->count++;
}

static void find_forms(pw_op *op) {
    op->preparation.count = 0;
    for (int32_t i = 0; i < op->n_parts; ++i)
        op->preparation.form_of[i] = form_index(&op->preparation, pw_form_of(&op->parts[i].weight));
}

/* A layer has the heads of its kind; one with a window keeps rings where there is room for them. */
static void place_layer(pw_program *program, const pw_op *op) {
    int64_t window = program->kinds[op->kind].window;
    program->layers[op->layer].n_kv_heads = program->kinds[op->kind].n_kv_heads;
    program->layers[op->layer].head_dim = program->kinds[op->kind].head_dim;
    if (window <= 0 || program->capacity.ring_slots == 0) return;
    program->layers[op->layer].in_rings = true;
    program->layers[op->layer].slots = program->capacity.ring_slots;
    program->ring_window = larger(program->ring_window, window);
}

bool pw_program_add(pw_program *program, const pw_op *op) {
    if (program->n_ops == program->ops_room) {
        int32_t room = program->ops_room ? 2 * program->ops_room : 64;
        pw_op *ops = realloc(program->ops, sizeof *ops * (size_t)room);
        if (!ops) return false;
        program->ops = ops;
        program->ops_room = room;
    }
    pw_op *added = &program->ops[program->n_ops++];
    *added = *op;
    if (op->code == PW_ATTEND) place_layer(program, op);
    if (op->experts.count > program->experts.count) program->experts.count = op->experts.count;
    if (op->experts.chosen > program->experts.chosen) program->experts.chosen = op->experts.chosen;
    find_forms(added);
    return true;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* The largest prepared row of any op: the ISA may be changed between steps. */
static void measure_rows(const pw_program *program, int64_t *row_bytes, int64_t *row_floats) {
    *row_bytes = *row_floats = 0;
    for (int32_t i = 0; i < program->n_ops; ++i) {
        const pw_op *op = &program->ops[i];
        if (op->code == PW_ADJUST || op->code == PW_GATE_ROWS || op->code == PW_LAYER_INPUTS || op->code == PW_STREAMS)
            *row_floats = larger(*row_floats, op->k);
        if (op->code != PW_LINEAR && op->code != PW_EXPERTS && op->code != PW_HEADS) continue;
        int64_t heads = op->code == PW_HEADS ? op->heads.count : 1; /* all of a row are prepared side by side */
        int64_t read = op->code == PW_EXPERTS && op->source == PW_FROM_GATE ? 2 * op->k : op->k; /* with biases added */
        *row_floats = larger(*row_floats, pw_padded_k(read));
        for (int32_t form = 0; form < op->preparation.count; ++form)
            for (int isa = 0; isa < pw_usable_count(); ++isa)
                *row_bytes = larger(*row_bytes, heads * pw_usable(isa)->gemm.row_bytes(&op->preparation.forms[form], op->k));
    }
    *row_bytes = pw_whole_lines(*row_bytes);
}

static int32_t most_forms(const pw_program *program) {
    int32_t most = 1;
    for (int32_t i = 0; i < program->n_ops; ++i) most = (int32_t)larger(most, program->ops[i].preparation.count);
    return most;
}

enum { SPLIT_ROWS = 32, MAX_SPLIT_FLOATS = 1 << 21 };

/* Room for the part sums of a few rows: with many, there is work enough for every thread without splitting k. */
static int64_t split_floats(const pw_program *program) {
    int64_t rows = program->capacity.max_tokens < SPLIT_ROWS ? program->capacity.max_tokens : SPLIT_ROWS, most = 0;
    for (int32_t i = 0; i < program->n_ops; ++i)
        for (int32_t part = 0; part < program->ops[i].n_parts; ++part) {
            const pw_weight *weight = &program->ops[i].parts[part].weight;
            if (program->ops[i].code == PW_LINEAR && weight->k_parts > 1)
                most = larger(most, pw_split_floats(weight, rows));
        }
    return most < MAX_SPLIT_FLOATS ? most : MAX_SPLIT_FLOATS;
}

/* Byte offsets: of what ranks share, within the shared memory (or program->rows, where nothing comes before the
 * arena), and of a process's own within program->memory. */
typedef struct {
    int64_t orders, tokens, logit_rows, slices, runs, keeps, arena, angles, prepared, pairs, low, chosen, index_scores, rows_end, kv, shared_end;
    int64_t partials, own_prepared, split, scratch, end;
    int64_t angles_each, split_each, private_row, prepared_each, own_prepared_each, scratch_each;
    int32_t forms;
} layout;

static void lay_out_step(const pw_program *program, layout *l) {
    const pw_capacity *room = &program->capacity;
    if (program->n_ranks == 1) return;
    l->orders = pw_orders_offset(program->n_ranks);
    l->tokens = l->orders + pw_whole_lines(pw_orders_bytes(program->n_ranks));
    l->logit_rows = l->tokens + pw_whole_lines(room->max_tokens * (int64_t)sizeof(int32_t));
    l->slices = l->logit_rows + pw_whole_lines(room->max_logit_rows * (int64_t)sizeof(int64_t));
    l->runs = l->slices + pw_whole_lines(room->max_slices * (int64_t)sizeof(pw_slice));
    l->keeps = l->runs + pw_whole_lines(room->max_slices * pw_runs_each(room) * (int64_t)sizeof(int32_t));
    l->arena = whole_pages(l->keeps + room->max_tokens * (int64_t)sizeof(pw_keep));
}

int32_t pw_copies_of(const pw_program *program, int32_t n_kv_heads, int32_t kv_head) {
    int32_t most = 1, group = program->shape.n_heads / n_kv_heads;
    if (program->shape.latent) return 1;
    for (int table = 0; table < PW_SCHEDULE_TABLES; ++table)
        most = (int32_t)larger(most, pw_sharers_of(&program->divisions[table], n_kv_heads, group, kv_head));
    return most;
}

static int64_t kept_heads(const pw_program *program, int64_t layer) {
    int64_t kept = 0;
    for (int32_t i = 0; i < program->layers[layer].n_kv_heads; ++i)
        kept += pw_copies_of(program, program->layers[layer].n_kv_heads, i);
    return kept;
}

/* Bytes of the keys and values of the layers before `layer`. */
static int64_t kv_bytes_before(const pw_program *program, int64_t layer) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < layer; ++i) bytes += kept_heads(program, i) * pw_layer_head_bytes(program, i);
    return bytes;
}

static bool place_keys_and_values(pw_program *program) {
    int64_t each = program->shape.n_kv_heads + 1;
    if (!NEW(program->copies, program->shape.n_layers * each)) return false;
    for (int32_t i = 0; i < program->shape.n_layers; ++i) {
        int32_t n_kv_heads = program->layers[i].n_kv_heads, *copies = program->copies + i * each;
        program->layers[i].offset = kv_bytes_before(program, i);
        program->layers[i].copies = copies;
        for (int32_t kv_head = 0; kv_head < n_kv_heads; ++kv_head)
            copies[kv_head + 1] = copies[kv_head] + pw_copies_of(program, n_kv_heads, kv_head);
    }
    return true;
}

static int64_t states_offset(const pw_program *program) {
    int64_t bytes = kv_bytes_before(program, program->shape.n_layers);
    return program->state_floats ? pw_states_after(bytes) : bytes;
}

int64_t pw_program_kv_bytes(const pw_program *program) {
    return states_offset(program) + program->capacity.state_places * program->state_floats * (int64_t)sizeof(float);
}

static layout lay_out(const pw_program *program) {
    const pw_capacity *room = &program->capacity;
    layout l = {0};
    int64_t row_bytes, row_floats, angles = pw_whole_lines(room->max_tokens * (program->shape.head_dim / 2) * 4);
    measure_rows(program, &row_bytes, &row_floats);
    l.forms = most_forms(program);
    l.private_row = row_bytes;
    l.prepared_each = pw_whole_lines(row_bytes * larger(room->max_tokens, room->max_logit_rows));
    l.own_prepared_each = program->n_ranks > 1 ? pw_whole_lines(row_bytes * PW_OWN_ROWS) : 0;
    int64_t linear = PW_MAX_PARTS * row_bytes + row_floats * 4;
    pw_shape widest = pw_widest_shape(program);
    l.scratch_each = pw_whole_lines(larger(linear, larger(pw_attend_scratch_floats(&widest), pw_choice_floats(program)) * 4));
    lay_out_step(program, &l);
    l.angles = l.arena + pw_whole_lines(program->arena_floats * 4);
    l.angles_each = angles;
    l.prepared = l.angles + 2 * program->n_kinds * angles;
    l.pairs = l.prepared + l.forms * l.prepared_each;
    l.low = l.pairs + program->experts.chosen * l.prepared_each;
    l.chosen = l.low + pw_whole_lines(low_rank_bytes(program));
    l.index_scores = l.chosen + pw_whole_lines(room->max_tokens * program->shape.chosen * (int64_t)sizeof(int32_t));
    l.rows_end = l.index_scores + (program->shape.index ? program->partial_room * PW_CHUNK * (int64_t)sizeof(float) : 0);
    l.kv = whole_pages(l.rows_end);
    l.shared_end = whole_pages(l.kv + pw_program_kv_bytes(program));
    l.own_prepared = pw_whole_lines(program->partial_room * pw_partial_floats(&program->shape) * 4);
    l.split = l.own_prepared + l.forms * l.own_prepared_each;
    l.split_each = pw_whole_lines(split_floats(program) * 4);
    l.scratch = l.split + PW_MAX_PARTS * l.split_each;
    l.end = l.scratch + room->max_threads * l.scratch_each;
    return l;
}

int64_t pw_program_bytes(const pw_program *program) {
    layout l = lay_out(program);
    return l.end + (program->n_ranks > 1 ? l.shared_end : l.rows_end + pw_program_kv_bytes(program));
}

int64_t pw_program_shared_bytes(const pw_program *program) { return lay_out(program).shared_end; }

pw_ticket *pw_region_tickets(const pw_program *program, int64_t op) {
    return program->region_tickets + op % 2 * pw_region_ticket_count(program);
}

/* Rows, KV and the step where every rank maps them. */
static void seal_shared(pw_program *program, const layout *l, char *shared) {
    pw_step *step = &program->step;
    if (!program->shared) free_what_is_told(step);
    program->shared = shared;
    program->group = (pw_group *)shared;
    program->orders = (pw_orders *)(shared + l->orders);
    step->tokens = (int32_t *)(shared + l->tokens);
    step->logit_rows = (int64_t *)(shared + l->logit_rows);
    step->slices = (pw_slice *)(shared + l->slices);
    step->runs = (int32_t *)(shared + l->runs);
    step->keeps = (pw_keep *)(shared + l->keeps);
    program->rows = shared;
    program->kv = shared + l->kv;
    if (program->rank == 0) pw_group_init(program->group, program->n_ranks);
}

static bool open_routes(pw_program *program) {
    pw_routes *routes = &program->routes;
    int64_t experts = program->experts.count, pairs = pw_most_rows(&program->capacity) * program->experts.chosen;
    if (pairs == 0) return true;
    return NEW(routes->expert, pairs) && NEW(routes->weight, pairs) && NEW(routes->pair, pairs) &&
           NEW(routes->expert_of, pairs) && NEW(routes->first, experts + 1) && NEW(routes->busy, experts);
}

bool pw_program_seal(pw_program *program, char *shared, char *kv) {
    layout l = lay_out(program);
    program->memory_bytes = l.end;
    program->rows_bytes = l.rows_end;
    program->kv_bytes = pw_program_kv_bytes(program);
    if (!place_keys_and_values(program)) return false;
    program->memory = pw_pages_open(l.end);
    if (shared) {
        seal_shared(program, &l, shared);
    } else {
        program->rows = pw_pages_open(l.rows_end);
        program->is_kv_given = kv != NULL;
        program->kv = kv ? kv : pw_pages_open(program->kv_bytes);
    }
    program->tickets = aligned_alloc(PW_LINE, sizeof(pw_ticket) * PW_MAX_PARTS * (size_t)(program->n_ops + 1));
    program->region_tickets = aligned_alloc(PW_LINE, 2 * sizeof(pw_ticket) * (size_t)pw_region_ticket_count(program));
    if (!program->memory || !program->rows || !program->kv || !program->tickets || !program->region_tickets) return false;
    if (!NEW(program->merged, pw_merged_count(program)) || !open_routes(program)) return false;
    if (!open_low_rank(program, program->rows + l.low)) return false;
    program->arena = (float *)(program->rows + l.arena);
    program->states = (float *)(program->kv + states_offset(program));
    for (int32_t kind = 0; kind < program->n_kinds; ++kind) {
        program->cosines[kind] = (float *)(program->rows + l.angles + 2 * kind * l.angles_each);
        program->sines[kind] = (float *)(program->rows + l.angles + (2 * kind + 1) * l.angles_each);
    }
    program->pairs = program->rows + l.pairs;
    program->chosen = (int32_t *)(program->rows + l.chosen);
    program->index_scores = (float *)(program->rows + l.index_scores);
    program->partials = (float *)program->memory;
    for (int32_t i = 0; i < l.forms; ++i) {
        program->prepared[i] = program->rows + l.prepared + i * l.prepared_each;
        program->own_prepared[i] = program->memory + l.own_prepared + i * l.own_prepared_each;
    }
    for (int i = 0; i < PW_MAX_PARTS && l.split_each; ++i)
        program->split[i] = (float *)(program->memory + l.split + i * l.split_each);
    program->split_floats = l.split_each / 4;
    program->scratch = program->memory + l.scratch;
    program->private_row_bytes = l.private_row;
    program->scratch_bytes = l.scratch_each;
    return true;
}

/* ---- touching memory -------------------------------------------------------------------------------------------- */

typedef struct {
    const pw_program *program;
    int members;
    atomic_int problem;
} touching;

/* Its own scratch, and as much of the rest as every other member. */
static void touch_share(void *context, int member) {
    touching *touch = context;
    const pw_program *program = touch->program;
    int64_t scratch = program->scratch - program->memory;
    const struct { char *begin; int64_t bytes; } areas[] = {
        {program->memory, scratch},
        {program->scratch, program->memory_bytes - scratch},
        {program->rows, program->rows_bytes},
        {program->kv, program->kv_bytes},
    };
    for (size_t i = 0; i < sizeof areas / sizeof *areas; ++i) {
        int64_t begin = areas[i].bytes * member / touch->members, end = areas[i].bytes * (member + 1) / touch->members;
        int problem = end > begin ? pw_pages_touch(areas[i].begin + begin, end - begin) : 0;
        if (problem) atomic_store(&touch->problem, problem);
    }
}

int pw_program_touch(pw_program *program, pw_team *team) {
    touching touch = {program, pw_team_size(team), 0};
    int status = pw_team_run(team, touch_share, &touch);
    return status == PW_TEAM_OK ? atomic_load(&touch.problem) : status;
}
