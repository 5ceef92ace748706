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
    pw_kv_head head = pw_kv_head_in(memory->kv, &memory->shape, &memory->room, heads_before);
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

void pw_kv_to_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, char *wire) {
    area areas[MOST_AREAS];
    for (int64_t kv_head = 0; kv_head < memory->shape.n_kv_heads; ++kv_head) {
        int count = areas_of(memory, layer, kv_head, 0, areas);
        for (int i = 0; i < count; ++i) {
            int64_t bytes = slots * areas[i].slot_bytes;
            memcpy(wire, areas[i].begin + slot * areas[i].slot_bytes, (size_t)bytes);
            wire += bytes;
        }
    }
}

/* One KV head in all of its copies; returns what follows it on the wire. */
static const char *take_head(const pw_kv_memory *memory, int64_t layer, int64_t kv_head, int64_t slot, int64_t slots,
                             const char *wire) {
    area areas[MOST_AREAS];
    const char *from = wire;
    for (int32_t copy = 0; copy < copies_of(memory, kv_head); ++copy) {
        int count = areas_of(memory, layer, kv_head, copy, areas);
        from = wire;
        for (int i = 0; i < count; ++i) {
            int64_t bytes = slots * areas[i].slot_bytes;
            memcpy(areas[i].begin + slot * areas[i].slot_bytes, from, (size_t)bytes);
            from += bytes;
        }
    }
    return from;
}

void pw_kv_from_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, const char *wire) {
    for (int64_t kv_head = 0; kv_head < memory->shape.n_kv_heads; ++kv_head)
        wire = take_head(memory, layer, kv_head, slot, slots, wire);
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
