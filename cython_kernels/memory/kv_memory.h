/* Keys and values in memory that may belong to another process, and their form between processes.
 *
 * Ranges of slots begin and end at multiples of 16, so that whole panels of keys are moved and no ISA matters. On the
 * wire a range of a layer is, head by head: its panels of keys, its values, and where the format has scales those of the
 * keys, then those of the values. A memory may keep copies of heads (pw_copies_of): the first is read, all are written.
 * The caller checks layers and ranges. */
#ifndef PHASEWISE_KV_MEMORY_H
#define PHASEWISE_KV_MEMORY_H

#include "memory/kv_layout.h"

typedef struct {
    char *kv;
    pw_shape shape;   /* n_layers, n_kv_heads, head_dim and latent are read */
    pw_capacity room; /* kv_slots and kv_format are read */
    const int32_t *copies; /* [n_kv_heads + 1]: copies before those of a KV head, in each layer */
} pw_kv_memory;

/* Bytes of `slots` slots of one layer on the wire. */
static inline int64_t pw_kv_wire_bytes(const pw_kv_memory *memory, int64_t slots) {
    return memory->shape.n_kv_heads * slots * pw_slot_bytes_of(&memory->shape, memory->room.kv_format);
}

void pw_kv_to_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, char *wire);
void pw_kv_from_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, const char *wire);

/* From one memory to another of the same shape and format. */
void pw_kv_between(const pw_kv_memory *from, const pw_kv_memory *to, int64_t layer, int64_t source, int64_t target,
                   int64_t slots);

#endif
