/* Where keys and values lie: by layer, then KV head, then slot; and how positions of a sequence find their slots. */
#ifndef PHASEWISE_KV_LAYOUT_H
#define PHASEWISE_KV_LAYOUT_H

#include <stdint.h>

#include "ops.h"

enum { PW_STATE_PAGE = 4096 };

/* The model's numbers that ops share. */
typedef struct {
    int32_t n_layers, n_heads, n_kv_heads, head_dim;
    int32_t latent; /* numbers of a value of latent attention, a multiple of 16, head_dim being those of a key; 0: keys and
                     * values are of their own */
    int32_t index;  /* numbers of an indexer's key, the last of a latent vector's head_dim; 0: there is no indexer */
    int64_t chosen; /* positions that an indexer leaves to a token */
    int64_t hidden, ffn, vocab;
    float norm_eps;
} pw_shape;

/* Bytes of one slot of a KV head of such a model. */
static inline int64_t pw_slot_bytes_of(const pw_shape *shape, int32_t format) {
    if (shape->latent) return pw_kv_elements(format, shape->head_dim) * pw_kv_element_bytes(format);
    return pw_kv_slot_bytes(format, shape->head_dim);
}

/* The KV head whose `slots` slots begin at `memory`. */
static inline pw_kv_head pw_kv_head_in_memory(const pw_shape *shape, char *memory, int64_t slots, int32_t format) {
    if (shape->latent) return pw_latent_at(memory, format, shape->head_dim - shape->index, shape->latent, shape->head_dim);
    return pw_kv_head_at(memory, slots, format, shape->head_dim);
}

typedef struct {
    int64_t kv_slots;        /* multiple of 16 */
    int64_t ring_slots;      /* of layers with windows, multiple of 16; 0: those have kv_slots like all others */
    int64_t max_tokens;      /* rows of one step */
    int64_t max_slices;
    int64_t max_logit_rows;
    int32_t kv_format;       /* pw_kv_format */
    int32_t max_threads;
    int64_t state_places;    /* of layers that keep a state of each sequence; 0: there are no such layers */
} pw_capacity;

/* Position p lies in slot slot_base + p; or, where first_run is not negative, as a table of n_runs among the step's runs says:
 * in slot runs[first_run + p / PW_CHUNK] + p % PW_CHUNK. Runs begin at multiples of 16.
 *
 * Layers with windows may keep a ring of each sequence instead: position p lies in slot ring_base + p % ring_slots, and
 * a later position takes the place of one that no token sees any more. Slots of rings are counted from kv_slots on. */
typedef struct {
    int64_t first_row, n_rows; /* rows of the step */
    int64_t start;             /* position of the first */
    int64_t slot_base;
    int64_t first_run, n_runs;
    int64_t second;            /* rows before those of the second text of a pair; n_rows where there is one text */
    int64_t ring_base, ring_slots; /* not read where no layer keeps rings */
    int64_t adapter;           /* of its rows, from 1 on (low_rank.h); 0: none */
    int64_t state;                 /* its place among states, not read where no layer keeps any */
    int64_t first_keep, n_keeps;   /* among the step's, ascending by row */
} pw_slice;

/* A copy of a slice's state after some of its rows. */
typedef struct {
    int64_t n_rows, place;
} pw_keep;

/* Slots [begin, end). */
typedef struct {
    int64_t begin, end;
} pw_slots;

/* Entries that the longest table of a slice has. */
static inline int64_t pw_runs_each(const pw_capacity *room) { return (room->kv_slots + PW_CHUNK - 1) / PW_CHUNK; }

/* Slot of the first position of a chunk of a checked slice; `runs`: the tables of the step. */
static inline int64_t pw_chunk_slot(const int32_t *runs, const pw_slice *slice, int64_t chunk) {
    return slice->first_run < 0 ? slice->slot_base + chunk * PW_CHUNK : runs[slice->first_run + chunk];
}

/* Where states begin, behind so many bytes of keys and values: with a page. */
static inline int64_t pw_states_after(int64_t kv_bytes) { return (kv_bytes + PW_STATE_PAGE - 1) / PW_STATE_PAGE * PW_STATE_PAGE; }

#endif
