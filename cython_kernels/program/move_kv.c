/* Moves keys and values of a program from slots to slots, of every layer. */
#include <stdlib.h>
#include <string.h>

#include "program/move_kv.h"

typedef struct {
    const pw_program *program;
    int64_t source, target, slots;
    bool in_rings;
    int members;
    char *line; /* [members][slots] elements */
} moving;

/* Slots of rows, values or scales, which lie one behind the other. */
static void move_rows(const moving *move, void *rows, int64_t row_bytes) {
    char *first = rows;
    memmove(first + move->target * row_bytes, first + move->source * row_bytes, (size_t)(move->slots * row_bytes));
}

/* One element of keys: 16 of them lie side by side, then comes the next panel. */
static void move_element(const pw_kv_head *head, pw_slots from, int64_t target, int64_t element, char *line) {
    int64_t bytes = pw_kv_element_bytes(head->format), slots = from.end - from.begin;
    int64_t panel = 16 * pw_key_elements(head);
    char *keys = (char *)head->keys + element * 16 * bytes;
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
    int64_t elements = pw_key_elements(head);
    for (int64_t element = 0; element < elements; ++element) move_element(head, from, target, element, line);
}

/* Whole panels at once where both ranges begin with one; what is left of the last panel must not be overwritten by the
 * others before it is moved, nor overwrite them. */
static void move_panels(const moving *move, const pw_kv_head *head, char *line) {
    int64_t slot_bytes = pw_key_elements(head) * pw_kv_element_bytes(head->format);
    int64_t whole = move->slots / 16 * 16;
    pw_slots rest = {move->source + whole, move->source + move->slots};
    char *keys = head->keys;
    if (move->target > move->source) move_keys(head, rest, move->target + whole, line);
    memmove(keys + move->target * slot_bytes, keys + move->source * slot_bytes, (size_t)(whole * slot_bytes));
    if (move->target < move->source) move_keys(head, rest, move->target + whole, line);
}

static void move_head(const moving *move, const pw_kv_head *head, char *line) {
    pw_slots all = {move->source, move->source + move->slots};
    move_rows(move, head->values, pw_value_elements(head) * pw_kv_element_bytes(head->format));
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
        int64_t layer = i / shape->n_kv_heads, kv_head = i % shape->n_kv_heads;
        const pw_layer_kv *own = &move->program->layers[layer];
        if (own->in_rings != move->in_rings || kv_head >= own->n_kv_heads) continue;
        for (int32_t copy = 0; copy < own->copies[kv_head + 1] - own->copies[kv_head]; ++copy) {
            pw_kv_head head = pw_kv_head_of(move->program, layer, kv_head, copy);
            move_head(move, &head, line);
        }
    }
}

static void move_states(void *context, int member) {
    const moving *move = context;
    int64_t floats = move->program->state_floats * move->slots;
    int64_t begin = floats * member / move->members, end = floats * (member + 1) / move->members;
    const float *from = move->program->states + move->source * move->program->state_floats;
    memcpy(move->program->states + move->target * move->program->state_floats + begin, from + begin,
           sizeof(float) * (size_t)(end - begin));
}

int pw_program_copy_states(pw_program *program, pw_team *team, int64_t source, int64_t target, int64_t places) {
    moving move = {program, source, target, places, false, pw_team_size(team), NULL};
    return pw_team_run(team, move_states, &move);
}

int pw_program_copy_kv(pw_program *program, pw_team *team, int64_t source, int64_t target, int64_t slots) {
    int members = pw_team_size(team);
    char *line = malloc((size_t)(slots * pw_kv_element_bytes(program->capacity.kv_format) * members));
    if (!line) return PW_TEAM_NO_MEMORY;
    int64_t first = source < program->capacity.kv_slots ? 0 : program->capacity.kv_slots;
    moving move = {program, source - first, target - first, slots, first > 0, members, line};
    int status = pw_team_run(team, move_share, &move);
    free(line);
    return status;
}
