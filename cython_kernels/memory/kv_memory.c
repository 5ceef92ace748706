#include <string.h>

#include "memory/kv_memory.h"

enum { MOST_AREAS = 4 };

/* What a head keeps by slot, with its bytes a slot. Panels of keys are whole, so that keys count as rows too. */
typedef struct {
    char *begin;
    int64_t slot_bytes;
} area;

static int areas_of(const pw_kv_memory *memory, int64_t layer, int64_t kv_head, int32_t copy, area *found) {
    int64_t heads_before = layer * memory->copies[memory->shape.n_kv_heads] + memory->copies[kv_head] + copy;
    int64_t slots = memory->room.kv_slots, head_bytes = slots * pw_slot_bytes_of(&memory->shape, memory->room.kv_format);
    char *begin = memory->kv + heads_before * head_bytes;
    pw_kv_head head = pw_kv_head_in_memory(&memory->shape, begin, slots, memory->room.kv_format);
    int64_t bytes = pw_kv_element_bytes(head.format);
    int count = 0;
    found[count++] = (area){head.keys, pw_key_elements(&head) * bytes};
    found[count++] = (area){head.values, pw_value_elements(&head) * bytes};
    if (head.key_scales) found[count++] = (area){(char *)head.key_scales, sizeof(float)};
    if (head.value_scales) found[count++] = (area){(char *)head.value_scales, sizeof(float)};
    return count;
}

static int32_t copies_of(const pw_kv_memory *memory, int64_t kv_head) {
    return memory->copies[kv_head + 1] - memory->copies[kv_head];
}

/* Slots of one copy of a KV head to the wire or from it; returns what follows them there. */
static char *pass_head(const pw_kv_memory *memory, int64_t layer, int64_t kv_head, int32_t copy, pw_slots slots, char *wire,
                       bool is_taken) {
    area areas[MOST_AREAS];
    int count = areas_of(memory, layer, kv_head, copy, areas);
    for (int i = 0; i < count; ++i) {
        char *here = areas[i].begin + slots.begin * areas[i].slot_bytes;
        int64_t bytes = (slots.end - slots.begin) * areas[i].slot_bytes;
        memcpy(is_taken ? here : wire, is_taken ? wire : here, (size_t)bytes);
        wire += bytes;
    }
    return wire;
}

void pw_kv_to_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, char *wire) {
    for (int64_t kv_head = 0; kv_head < memory->shape.n_kv_heads; ++kv_head)
        wire = pass_head(memory, layer, kv_head, 0, (pw_slots){slot, slot + slots}, wire, false);
}

void pw_kv_from_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, const char *wire) {
    char *from = (char *)wire, *next = from;
    for (int64_t kv_head = 0; kv_head < memory->shape.n_kv_heads; ++kv_head, from = next)
        for (int32_t copy = 0; copy < copies_of(memory, kv_head); ++copy)
            next = pass_head(memory, layer, kv_head, copy, (pw_slots){slot, slot + slots}, from, true);
}

void pw_kv_between(const pw_kv_memory *from, const pw_kv_memory *to, int64_t layer, int64_t source, int64_t target,
                   int64_t slots) {
    area given[MOST_AREAS], taken[MOST_AREAS];
    for (int64_t kv_head = 0; kv_head < from->shape.n_kv_heads; ++kv_head) {
        int count = areas_of(from, layer, kv_head, 0, given);
        for (int32_t copy = 0; copy < copies_of(to, kv_head); ++copy) {
            areas_of(to, layer, kv_head, copy, taken);
            for (int i = 0; i < count; ++i)
                memcpy(taken[i].begin + target * taken[i].slot_bytes, given[i].begin + source * given[i].slot_bytes,
                       (size_t)(slots * given[i].slot_bytes));
        }
    }
}
