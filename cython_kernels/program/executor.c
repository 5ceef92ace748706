/* A step of a program: what must hold of it, where its rows lie, and its run. */
#include <stdlib.h>
#include <string.h>

#include "program/attend.h"
#include "program/executor.h"
#include "program/experts.h"
#include "indexer/choose.h"
#include "program/linear.h"
#include "state/streams.h"
#include "adapters/low_rank.h"
#include "state/run_state.h"

/* The slots of positions [position, end) of a slice, as far as they lie one behind the other. */
static pw_slots slots_from(const pw_step *step, const pw_slice *slice, int64_t position, int64_t end) {
    int64_t chunk = position / PW_CHUNK, slot = pw_chunk_slot(step->runs, slice, chunk) + position % PW_CHUNK;
    int64_t run_end = slice->first_run < 0 ? end : (chunk + 1) * PW_CHUNK;
    return (pw_slots){slot, slot + (run_end < end ? run_end : end) - position};
}

static const char *check_table(const pw_program *program, const pw_slice *slice) {
    int64_t end = slice->start + slice->n_rows, slots = program->capacity.kv_slots;
    int64_t room = program->capacity.max_slices * pw_runs_each(&program->capacity);
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

/* A ring of which no token of the slice, nor of those before, still sees a slot that the slice writes. */
static const char *check_ring(const pw_program *program, const pw_slice *slice) {
    int64_t base = slice->ring_base - program->capacity.kv_slots, slots = slice->ring_slots;
    if (slots < 1 || slots % 16 || base < 0 || base % 16 || slots > program->capacity.ring_slots - base)
        return "a ring lies outside the slots of rings";
    if (slice->start + slice->n_rows <= slots) return NULL;
    if (slots % PW_CHUNK || slots < program->ring_window + slice->n_rows - 1)
        return "a ring is shorter than the window and the tokens of its slice";
    return NULL;
}

static const char *check_places(const pw_program *program, const pw_slice *slice) {
    int64_t slots = program->capacity.kv_slots;
    if (slice->start < 0 || slice->start > slots || slice->start + slice->n_rows > slots)
        return "a slice lies outside the KV slots";
    const char *problem = program->ring_window ? check_ring(program, slice) : NULL;
    if (problem) return problem;
    if (slice->first_run >= 0) return check_table(program, slice);
    if (slice->slot_base < 0 || slice->slot_base > slots - slice->start - slice->n_rows)
        return "a slice lies outside the KV slots";
    return NULL;
}

/* Where a slice's rows lie in rings. */
static void place_in_ring(pw_program *program, const pw_slice *slice) {
    int64_t base = slice->ring_base - program->capacity.kv_slots;
    for (int64_t i = 0; i < slice->n_rows; ++i)
        program->step.ring_places[slice->first_row + i] = base + (slice->start + i) % slice->ring_slots;
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
        if (program->bidirectional && slice->start != 0) return "a slice is not the whole of its sequence";
        if (program->n_positions && slice->start + slice->n_rows > program->n_positions)
            return "a slice has more tokens than the model has positions";
        if (slice->first_row != row || slice->n_rows > step->n_tokens - row)
            return "slices do not cover the step's rows";
        const char *problem = check_places(program, slice);
        if (problem) return problem;
        place_rows(step, slice);
        if (program->ring_window) place_in_ring(program, slice);
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

/* No two slices of a step have a slot of rings in common. */
static const char *check_rings_apart(pw_program *program) {
    pw_step *step = &program->step;
    for (int64_t s = 0; s < step->n_slices; ++s) {
        const pw_slice *slice = &step->slices[s];
        step->rings[s] = (pw_slots){slice->ring_base, slice->ring_base + slice->ring_slots};
    }
    qsort(step->rings, (size_t)step->n_slices, sizeof *step->rings, by_begin);
    for (int64_t s = 1; s < step->n_slices; ++s)
        if (step->rings[s].begin < step->rings[s - 1].end) return "two slices share a ring";
    return NULL;
}

const char *pw_program_check(pw_program *program, int threads, int32_t table) {
    pw_step *step = &program->step;
    const pw_capacity *room = &program->capacity;
    if (threads < 1 || threads > room->max_threads) return "the program was built for fewer threads";
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
    if (!problem && program->ring_window) problem = check_rings_apart(program);
    if (!problem) problem = pw_low_rank_check(program);
    if (!problem && program->state_floats) problem = pw_check_states(program);
    if (!problem) pw_plan_attention(program, threads, table);
    return problem;
}

static void (*const RUN[])(pw_run *run, const pw_op *op, int member) = {
    [PW_EMBED] = pw_run_embed, [PW_LINEAR] = pw_run_linear, [PW_ATTEND] = pw_run_attend, [PW_INDEX] = pw_run_choose,
    [PW_ADJUST] = pw_run_adjust, [PW_ROUTE] = pw_run_route, [PW_EXPERTS] = pw_run_experts, [PW_COMBINE] = pw_run_combine,
    [PW_HEADS] = pw_run_heads, [PW_CONVOLVE] = pw_run_convolve, [PW_STATE_GATES] = pw_run_state_gates,
    [PW_RECUR] = pw_run_recur, [PW_GATE_ROWS] = pw_run_gate_rows, [PW_LAYER_INPUTS] = pw_run_layer_inputs,
    [PW_STREAMS] = pw_run_streams,
};

/* Between ranks every op ends with a barrier, between threads the last one is the team's own. */
static void run_ops(void *context, int member) {
    pw_run *run = context;
    pw_program *program = run->program;
    for (int32_t i = 0; i < program->n_ops; ++i) {
        const pw_op *op = &program->ops[i];
        pw_clear_tickets(pw_region_tickets(program, i + 1), (int)pw_region_ticket_count(program), run->threads, member);
        RUN[op->code](run, op, member);
        if (i + 1 == program->n_ops && run->division->ranks == 1) return;
        if (!pw_meet(run, member)) return;
        if (op->code == PW_ATTEND && !op->only_reads && member == 0 && program->rank == 0)
            atomic_fetch_add_explicit(&program->progress, 1, memory_order_release);
    }
}

/* A step begins: none of its layers is stored. */
static void begin_progress(pw_program *program) {
    long long begun = atomic_load_explicit(&program->progress, memory_order_relaxed) / PW_PROGRESS_LAYERS + 1;
    atomic_store_explicit(&program->progress, begun * PW_PROGRESS_LAYERS, memory_order_release);
}

int pw_program_run(pw_program *program, pw_team *team, int32_t table) {
    pw_run run = {program, team, pw_active(), pw_team_size(team), table, &program->divisions[table], PW_TEAM_OK};
    begin_progress(program);
    memset(program->tickets, 0, sizeof(pw_ticket) * PW_MAX_PARTS * (size_t)program->n_ops);
    memset(program->region_tickets, 0, 2 * sizeof(pw_ticket) * (size_t)pw_region_ticket_count(program));
    memset(program->merged, 0, sizeof *program->merged * (size_t)pw_merged_count(program));
    int status = pw_team_run(team, run_ops, &run);
    return status == PW_TEAM_OK ? atomic_load(&run.status) : status;
}
