#include "program.h"

#include <stdlib.h>
#include <string.h>

#include "orders.h"
#include "pages.h"

#define LINE 64

enum { PAGE = 4096 };

static int64_t aligned(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }
static int64_t whole_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- building --------------------------------------------------------------------------------------------------- */

int64_t pw_runs_each(const pw_program *program) { return (program->capacity.kv_slots + PW_CHUNK - 1) / PW_CHUNK; }

static bool open_step(pw_program *program) {
    const pw_capacity *room = &program->capacity;
    pw_step *step = &program->step;
    program->partial_room = room->kv_slots / PW_CHUNK + 2 * room->max_slices;
    int64_t pieces = larger(room->max_tokens, program->partial_room);
    step->tokens = calloc((size_t)room->max_tokens, sizeof *step->tokens);
    step->positions = calloc((size_t)room->max_tokens, sizeof *step->positions);
    step->slots = calloc((size_t)room->max_tokens, sizeof *step->slots);
    step->logit_rows = calloc((size_t)room->max_logit_rows, sizeof *step->logit_rows);
    step->slices = calloc((size_t)room->max_slices, sizeof *step->slices);
    step->runs = calloc((size_t)(room->max_slices * pw_runs_each(program)), sizeof *step->runs);
    step->written = calloc((size_t)room->max_tokens, sizeof *step->written);
    step->first_part = calloc((size_t)room->max_slices, sizeof *step->first_part);
    step->pieces = calloc((size_t)pieces, sizeof *step->pieces);
    step->tail_pieces = calloc((size_t)room->max_logit_rows, sizeof *step->tail_pieces);
    program->merged = calloc((size_t)(room->max_slices * program->shape.n_kv_heads), sizeof *program->merged);
    return step->tokens && step->positions && step->slots && step->logit_rows && step->slices && step->runs &&
           step->written && step->first_part && step->pieces && step->tail_pieces && program->merged;
}

pw_program *pw_program_open(pw_shape shape, pw_capacity capacity, const double *inv_freq) {
    pw_program *program = calloc(1, sizeof *program);
    if (!program) return NULL;
    size_t angles = sizeof(double) * (size_t)(shape.head_dim / 2);
    program->shape = shape;
    program->capacity = capacity;
    program->n_ranks = 1;
    for (int table = 0; table < PW_SCHEDULE_TABLES; ++table) program->divisions[table] = (pw_division){1, 0, 1, 1};
    program->inv_freq = malloc(angles);
    if (!open_step(program) || !program->inv_freq) {
        pw_program_close(program);
        return NULL;
    }
    memcpy(program->inv_freq, inv_freq, angles);
    return program;
}

/* What a step consists of, which the other ranks read where rank 0 writes it. */
static void free_what_is_told(pw_step *step) {
    free(step->tokens);
    free(step->logit_rows);
    free(step->slices);
    free(step->runs);
}

void pw_program_close(pw_program *program) {
    if (!program) return;
    pw_step *step = &program->step;
    pw_pages_close(program->memory, program->memory_bytes);
    if (!program->shared) {
        pw_pages_close(program->rows, program->rows_bytes);
        pw_pages_close(program->kv, program->kv_bytes);
        free_what_is_told(step);
    }
    void *owned[] = {program->ops,      program->inv_freq,       program->tickets,  program->merged,
                     program->region_tickets, step->positions,   step->slots,       step->first_part,
                     step->pieces,      step->tail_pieces,       step->written};
    for (int table = 0; table < PW_SCHEDULE_TABLES; ++table) {
        free(program->attention[table].ranges);
        for (int32_t i = 0; i < program->n_ops; ++i)
            for (int32_t part = 0; part < program->ops[i].n_parts; ++part)
                free(program->ops[i].shares[table][part].schedules.ranges);
    }
    for (size_t i = 0; i < sizeof owned / sizeof *owned; ++i) free(owned[i]);
    free(program);
}

static int32_t form_index(pw_op *op, pw_form form) {
    for (int32_t i = 0; i < op->n_forms; ++i)
        if (memcmp(&op->forms[i], &form, sizeof form) == 0) return i;
    op->forms[op->n_forms] = form;
    return op->n_forms++;
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
    added->n_forms = 0;
    for (int32_t i = 0; i < added->n_parts; ++i)
        added->parts[i].form = form_index(added, pw_form_of(&added->parts[i].weight));
    return true;
}

static bool replace_schedules(pw_schedules *schedules, int32_t count, const pw_row_range *ranges) {
    pw_row_range *copy = malloc(sizeof *copy * (size_t)larger(count, 1));
    if (!copy) return false;
    if (count) memcpy(copy, ranges, sizeof *copy * (size_t)count);
    free(schedules->ranges);
    *schedules = (pw_schedules){count, copy};
    return true;
}

bool pw_program_schedule(pw_program *program, int32_t table, int32_t op, int32_t part, int32_t count,
                         const pw_row_range *ranges) {
    return replace_schedules(&program->ops[op].shares[table][part].schedules, count, ranges);
}

bool pw_program_schedule_attention(pw_program *program, int32_t table, int32_t count, const pw_row_range *ranges) {
    return replace_schedules(&program->attention[table], count, ranges);
}

const pw_schedule *pw_tuned(const pw_schedules *known, int64_t rows) {
    int32_t low = 0, high = known->count; /* the first range that reaches so far */
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (known->ranges[middle].last_rows < rows)
            low = middle + 1;
        else
            high = middle;
    }
    return low < known->count && known->ranges[low].tuned ? &known->ranges[low].schedule : NULL;
}

pw_schedule pw_program_schedule_of(const pw_column_share *share, int64_t rows, int threads) {
    const pw_schedule *tuned = pw_tuned(&share->schedules, rows);
    return tuned ? *tuned : pw_default_schedule(&share->weight, rows, threads);
}

/* ---- ranks ------------------------------------------------------------------------------------------------------ */

pw_division pw_division_of(int32_t ranks, const int32_t *threads, int32_t rank) {
    pw_division division = {.ranks = ranks};
    for (int32_t i = 0; i < ranks; ++i) {
        if (i < rank) division.first_thread += threads[i];
        if (i == rank) division.own_threads = threads[i];
        division.n_threads += threads[i];
    }
    return division;
}

pw_range pw_share_of(const pw_division *division, int64_t count) {
    if (division->own_threads == 0) return (pw_range){0, 0};
    int64_t first = division->first_thread, threads = division->n_threads;
    return (pw_range){count * first / threads, count * (first + division->own_threads) / threads};
}

pw_range pw_rows_of(const pw_run *run, int64_t rows, int member) {
    bool alone = run->division->ranks == 1;
    int64_t threads = alone ? run->threads : run->division->n_threads;
    int64_t thread = alone ? member : run->division->first_thread + member;
    return (pw_range){rows * thread / threads, rows * (thread + 1) / threads};
}

/* By the last of a team to arrive. Whoever leaves a step takes all others with it. */
static void meet_ranks(void *context) {
    pw_run *run = context;
    const pw_program *program = run->program;
    int status = pw_group_barrier(program->group, program->rank, run->division->ranks, program->patience_ns);
    if (status == PW_GROUP_OK) return;
    pw_group_fail(program->group);
    atomic_store_explicit(&run->status, status == PW_GROUP_LATE ? PW_RUN_LATE : PW_RUN_GROUP_FAILED,
                          memory_order_relaxed);
}

/* The status changes only while every member waits, so that all of them leave at the same barrier. */
bool pw_meet(pw_run *run, int member) {
    if (run->division->ranks == 1) {
        pw_team_barrier(run->team, member);
        return true;
    }
    pw_team_barrier_beyond(run->team, member, meet_ranks, run);
    return atomic_load_explicit(&run->status, memory_order_relaxed) == PW_TEAM_OK;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* The largest prepared row of any op under any table: the ISA may be changed between steps. */
static void measure_rows(const pw_program *program, int64_t *row_bytes, int64_t *row_floats) {
    *row_bytes = *row_floats = 0;
    for (int32_t i = 0; i < program->n_ops; ++i) {
        const pw_op *op = &program->ops[i];
        if (op->code != PW_LINEAR) continue;
        *row_floats = larger(*row_floats, pw_padded_k(op->k));
        for (int32_t form = 0; form < op->n_forms; ++form)
            for (int isa = 0; isa < pw_usable_count(); ++isa)
                *row_bytes = larger(*row_bytes, pw_usable(isa)->gemm.row_bytes(&op->forms[form], op->k));
    }
    *row_bytes = aligned(*row_bytes);
}

static int32_t most_forms(const pw_program *program) {
    int32_t most = 1;
    for (int32_t i = 0; i < program->n_ops; ++i) most = (int32_t)larger(most, program->ops[i].n_forms);
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
    int64_t orders, tokens, logit_rows, slices, runs, arena, cosines, sines, prepared, rows_end, kv, shared_end;
    int64_t partials, own_prepared, split, scratch, end;
    int64_t split_each, private_row, prepared_each, own_prepared_each, scratch_each;
    int32_t forms;
} layout;

static int64_t kv_bytes(const pw_program *program) {
    return program->shape.n_layers * (int64_t)program->shape.n_kv_heads * pw_kv_head_bytes(program);
}

static void lay_out_step(const pw_program *program, layout *l) {
    const pw_capacity *room = &program->capacity;
    if (program->n_ranks == 1) return;
    l->orders = pw_orders_offset(program);
    l->tokens = l->orders + aligned(pw_orders_bytes(program));
    l->logit_rows = l->tokens + aligned(room->max_tokens * (int64_t)sizeof(int32_t));
    l->slices = l->logit_rows + aligned(room->max_logit_rows * (int64_t)sizeof(int64_t));
    l->runs = l->slices + aligned(room->max_slices * (int64_t)sizeof(pw_slice));
    l->arena = whole_pages(l->runs + room->max_slices * pw_runs_each(program) * (int64_t)sizeof(int32_t));
}

static layout lay_out(const pw_program *program) {
    const pw_capacity *room = &program->capacity;
    layout l = {0};
    int64_t row_bytes, row_floats, angles = aligned(room->max_tokens * (program->shape.head_dim / 2) * 4);
    measure_rows(program, &row_bytes, &row_floats);
    l.forms = most_forms(program);
    l.private_row = row_bytes;
    l.prepared_each = aligned(row_bytes * larger(room->max_tokens, room->max_logit_rows));
    l.own_prepared_each = program->n_ranks > 1 ? aligned(row_bytes * PW_OWN_ROWS) : 0;
    int64_t linear = PW_MAX_PARTS * row_bytes + row_floats * 4;
    l.scratch_each = aligned(larger(linear, pw_attend_scratch_floats(&program->shape) * 4));
    lay_out_step(program, &l);
    l.cosines = l.arena + aligned(program->arena_floats * 4);
    l.sines = l.cosines + angles;
    l.prepared = l.sines + angles;
    l.rows_end = l.prepared + l.forms * l.prepared_each;
    l.kv = whole_pages(l.rows_end);
    l.shared_end = whole_pages(l.kv + kv_bytes(program));
    l.own_prepared = aligned(program->partial_room * pw_partial_floats(&program->shape) * 4);
    l.split = l.own_prepared + l.forms * l.own_prepared_each;
    l.split_each = aligned(split_floats(program) * 4);
    l.scratch = l.split + PW_MAX_PARTS * l.split_each;
    l.end = l.scratch + room->max_threads * l.scratch_each;
    return l;
}

int64_t pw_program_bytes(const pw_program *program) {
    layout l = lay_out(program);
    return l.end + (program->n_ranks > 1 ? l.shared_end : l.rows_end + kv_bytes(program));
}

int64_t pw_program_shared_bytes(const pw_program *program) { return lay_out(program).shared_end; }

static int64_t region_tickets_each(const pw_program *program) {
    return PW_MAX_PARTS * (int64_t)program->capacity.max_threads;
}

pw_ticket *pw_region_tickets(const pw_program *program, int64_t op) {
    return program->region_tickets + op % 2 * region_tickets_each(program);
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
    program->rows = shared;
    program->kv = shared + l->kv;
    if (program->rank == 0) pw_group_init(program->group, program->n_ranks);
}

bool pw_program_seal(pw_program *program, char *shared) {
    layout l = lay_out(program);
    program->memory_bytes = l.end;
    program->rows_bytes = l.rows_end;
    program->kv_bytes = kv_bytes(program);
    program->memory = pw_pages_open(l.end);
    if (shared) {
        seal_shared(program, &l, shared);
    } else {
        program->rows = pw_pages_open(l.rows_end);
        program->kv = pw_pages_open(program->kv_bytes);
    }
    program->tickets = aligned_alloc(LINE, sizeof(pw_ticket) * PW_MAX_PARTS * (size_t)(program->n_ops + 1));
    program->region_tickets = aligned_alloc(LINE, 2 * sizeof(pw_ticket) * (size_t)region_tickets_each(program));
    if (!program->memory || !program->rows || !program->kv || !program->tickets || !program->region_tickets)
        return false;
    program->arena = (float *)(program->rows + l.arena);
    program->cosines = (float *)(program->rows + l.cosines);
    program->sines = (float *)(program->rows + l.sines);
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

/* ---- a step ----------------------------------------------------------------------------------------------------- */

/* The slots of positions [position, end) of a slice, as far as they lie one behind the other. */
static pw_slots slots_from(const pw_step *step, const pw_slice *slice, int64_t position, int64_t end) {
    int64_t chunk = position / PW_CHUNK, slot = pw_chunk_slot(step, slice, chunk) + position % PW_CHUNK;
    int64_t run_end = slice->first_run < 0 ? end : (chunk + 1) * PW_CHUNK;
    return (pw_slots){slot, slot + (run_end < end ? run_end : end) - position};
}

static const char *check_table(const pw_program *program, const pw_slice *slice) {
    int64_t end = slice->start + slice->n_rows, slots = program->capacity.kv_slots;
    int64_t room = program->capacity.max_slices * pw_runs_each(program);
    if (slice->n_runs < 0 || slice->n_runs > room || slice->first_run > room - slice->n_runs)
        return "a table lies outside the step";
    if (slice->n_runs * PW_CHUNK < end) return "a table has too few runs for its slice's positions";
    for (int64_t position = 0; position < end; position += PW_CHUNK) {
        int64_t run = program->step.runs[slice->first_run + position / PW_CHUNK];
        if (run % 16) return "a run of a table does not begin at a multiple of 16 slots";
        if (run < 0 || run + (end - position < PW_CHUNK ? end - position : PW_CHUNK) > slots)
            return "a slice lies outside the KV slots";
    }
    return NULL;
}

static const char *check_places(const pw_program *program, const pw_slice *slice) {
    int64_t slots = program->capacity.kv_slots;
    if (slice->start < 0 || slice->start > slots || slice->start + slice->n_rows > slots)
        return "a slice lies outside the KV slots";
    if (slice->first_run >= 0) return check_table(program, slice);
    if (slice->slot_base < 0 || slice->slot_base > slots - slice->start - slice->n_rows)
        return "a slice lies outside the KV slots";
    return NULL;
}

static void place_rows(pw_step *step, const pw_slice *slice) {
    int64_t row = slice->first_row, end = slice->start + slice->n_rows;
    for (int64_t position = slice->start; position < end;) {
        pw_slots run = slots_from(step, slice, position, end);
        step->written[step->n_written++] = run;
        for (int64_t slot = run.begin; slot < run.end; ++slot, ++position, ++row) {
            step->positions[row] = position;
            step->slots[row] = slot;
        }
    }
}

static const char *check_slices(pw_program *program) {
    pw_step *step = &program->step;
    int64_t row = 0;
    step->n_written = 0;
    for (int64_t s = 0; s < step->n_slices; ++s) {
        const pw_slice *slice = &step->slices[s];
        if (slice->n_rows < 1) return "a slice has no tokens";
        if (slice->first_row != row || slice->n_rows > step->n_tokens - row)
            return "slices do not cover the step's rows";
        const char *problem = check_places(program, slice);
        if (problem) return problem;
        place_rows(step, slice);
        row += slice->n_rows;
    }
    return row == step->n_tokens ? NULL : "slices do not cover the step's rows";
}

static int by_begin(const void *a, const void *b) {
    int64_t first = ((const pw_slots *)a)->begin, second = ((const pw_slots *)b)->begin;
    return (first > second) - (first < second);
}

/* How many of a step's written slots come before `slot`, where each was written by a token of its own. */
static int64_t written_before(const pw_step *step, int64_t slot) {
    int64_t low = 0, high = step->n_written;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (step->written[middle].begin < slot) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Whether of all slots that a slice of one token reads, this step writes the token's own alone, and once. */
static bool reads_what_was_there(const pw_step *step, const pw_slice *slice) {
    int64_t end = slice->start + 1, written = 0;
    for (int64_t position = 0; position < end;) {
        pw_slots run = slots_from(step, slice, position, end);
        written += written_before(step, run.end) - written_before(step, run.begin);
        position += run.end - run.begin;
    }
    return written == 1;
}

/* Every slot is written once; `split` stays true only if no token reads a slot that another writes in this step. */
static const char *check_overlaps(pw_step *step) {
    qsort(step->written, (size_t)step->n_written, sizeof *step->written, by_begin);
    for (int64_t i = 1; i < step->n_written; ++i)
        if (step->written[i].begin < step->written[i - 1].end) return "two tokens write the same KV slot";
    step->split = step->n_tokens == step->n_slices;
    for (int64_t s = 0; s < step->n_slices && step->split; ++s)
        step->split = reads_what_was_there(step, &step->slices[s]);
    return NULL;
}

const char *pw_program_check(pw_program *program, int threads, int32_t table) {
    pw_step *step = &program->step;
    const pw_capacity *room = &program->capacity;
    if (threads < 1 || threads > room->max_threads) return "the program was not built for so many threads";
    if (step->n_tokens < 1 || step->n_tokens > room->max_tokens) return "the step has no tokens or too many";
    if (step->n_slices < 1 || step->n_slices > room->max_slices) return "the step has no slices or too many";
    if (step->n_logit_rows < 0 || step->n_logit_rows > room->max_logit_rows) return "too many rows want logits";
    for (int64_t i = 0; i < step->n_tokens; ++i)
        if (step->tokens[i] < 0 || step->tokens[i] >= program->shape.vocab) return "a token is outside the vocabulary";
    for (int64_t i = 0; i < step->n_logit_rows; ++i)
        if (step->logit_rows[i] < (i ? step->logit_rows[i - 1] + 1 : 0) || step->logit_rows[i] >= step->n_tokens)
            return "logits of a row that is not there, or of rows out of order";
    const char *problem = check_slices(program);
    if (!problem) problem = check_overlaps(step);
    if (!problem) pw_plan_attention(program, threads, table);
    return problem;
}

/* Between ranks every op ends with a barrier, between threads the last one is the team's own. */
static void run_ops(void *context, int member) {
    pw_run *run = context;
    const pw_program *program = run->program;
    for (int32_t i = 0; i < program->n_ops; ++i) {
        const pw_op *op = &program->ops[i];
        pw_clear_tickets(pw_region_tickets(program, i + 1), (int)region_tickets_each(program), run->threads, member);
        if (op->code == PW_EMBED) pw_run_embed(run, op, member);
        if (op->code == PW_LINEAR) pw_run_linear(run, op, member);
        if (op->code == PW_ATTEND) pw_run_attend(run, op, member);
        if (i + 1 == program->n_ops && run->division->ranks == 1) return;
        if (!pw_meet(run, member)) return;
    }
}

int pw_program_run(pw_program *program, pw_team *team, int32_t table) {
    pw_run run = {program, team, pw_active(), pw_team_size(team), table, &program->divisions[table], PW_TEAM_OK};
    memset(program->tickets, 0, sizeof(pw_ticket) * PW_MAX_PARTS * (size_t)program->n_ops);
    memset(program->region_tickets, 0, 2 * sizeof(pw_ticket) * (size_t)region_tickets_each(program));
    memset(program->merged, 0, sizeof *program->merged * (size_t)(program->step.n_slices * program->shape.n_kv_heads));
    int status = pw_team_run(team, run_ops, &run);
    return status == PW_TEAM_OK ? atomic_load(&run.status) : status;
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

/* ---- moving keys and values ------------------------------------------------------------------------------------- */

typedef struct {
    const pw_program *program;
    int64_t source, target, slots;
    int members;
    char *line; /* [members][slots] elements */
} moving;

/* Slots of rows, values or scales, which lie one behind the other. */
static void move_rows(const moving *move, void *rows, int64_t row_bytes) {
    char *first = rows;
    memmove(first + move->target * row_bytes, first + move->source * row_bytes, (size_t)(move->slots * row_bytes));
}

/* One dimension of keys: 16 of them lie side by side, then comes the next panel. */
static void move_dimension(const pw_kv_head *head, pw_slots from, int64_t target, int64_t dimension, char *line) {
    int64_t bytes = pw_kv_element_bytes(head->format), panel = 16 * head->head_dim, slots = from.end - from.begin;
    char *keys = (char *)head->keys + dimension * 16 * bytes;
    for (int pass = 0; pass < 2; ++pass) /* out of the cache, then back into it: the ranges may overlap */
        for (int64_t done = 0, run; done < slots; done += run) {
            int64_t slot = (pass ? target : from.begin) + done;
            run = 16 - slot % 16;
            if (run > slots - done) run = slots - done;
            char *at = keys + (slot / 16 * panel + slot % 16) * bytes;
            memcpy(pass ? at : line + done * bytes, pass ? line + done * bytes : at, (size_t)(run * bytes));
        }
}

static void move_keys(const pw_kv_head *head, pw_slots from, int64_t target, char *line) {
    for (int64_t dimension = 0; dimension < head->head_dim; ++dimension)
        move_dimension(head, from, target, dimension, line);
}

/* Whole panels at once where both ranges begin with one; what is left of the last panel must not be overwritten by the
 * others before it is moved, nor overwrite them. */
static void move_panels(const moving *move, const pw_kv_head *head, char *line) {
    int64_t slot_bytes = head->head_dim * pw_kv_element_bytes(head->format), whole = move->slots / 16 * 16;
    pw_slots rest = {move->source + whole, move->source + move->slots};
    char *keys = head->keys;
    if (move->target > move->source) move_keys(head, rest, move->target + whole, line);
    memmove(keys + move->target * slot_bytes, keys + move->source * slot_bytes, (size_t)(whole * slot_bytes));
    if (move->target < move->source) move_keys(head, rest, move->target + whole, line);
}

static void move_head(const moving *move, const pw_kv_head *head, char *line) {
    pw_slots all = {move->source, move->source + move->slots};
    move_rows(move, head->values, head->value_dim * pw_kv_element_bytes(head->format));
    if (head->key_scales) move_rows(move, head->key_scales, sizeof(float));
    if (head->value_scales) move_rows(move, head->value_scales, sizeof(float));
    if (move->source % 16 || move->target % 16) move_keys(head, all, move->target, line);
    else move_panels(move, head, line);
}

static void move_share(void *context, int member) {
    const moving *move = context;
    const pw_shape *shape = &move->program->shape;
    int64_t heads = (int64_t)shape->n_layers * shape->n_kv_heads;
    char *line = move->line + member * move->slots * pw_kv_element_bytes(move->program->capacity.kv_format);
    for (int64_t i = heads * member / move->members; i < heads * (member + 1) / move->members; ++i) {
        pw_kv_head head = pw_kv_head_of(move->program, i / shape->n_kv_heads, i % shape->n_kv_heads);
        move_head(move, &head, line);
    }
}

int pw_program_copy_kv(pw_program *program, pw_team *team, int64_t source, int64_t target, int64_t slots) {
    int members = pw_team_size(team);
    char *line = malloc((size_t)(slots * pw_kv_element_bytes(program->capacity.kv_format) * members));
    if (!line) return PW_TEAM_NO_MEMORY;
    moving move = {program, source, target, slots, members, line};
    int status = pw_team_run(team, move_share, &move);
    free(line);
    return status;
}
