/* Streams that may say anything: checked, and unpacked where the check lets them pass. Run under AddressSanitizer, which
 * ends the program at a byte outside. Each stream is in memory of its own size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sparse.h"

static uint64_t state = 1;
static uint32_t drawn(void) { return (uint32_t)((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }

static void one(int32_t kind) {
    pw_sparse_shape shape = {kind, kind == PW_Q8 ? 128 : 0, 1 + drawn() % 3, 1 + drawn() % 200};
    size_t dense = (size_t)(shape.panels * pw_padded_k(shape.k) * PW_PANEL * pw_element_bytes(kind));
    size_t slots = (size_t)(shape.panels * pw_sparse_slots(shape.k));
    uint8_t *from = malloc(dense), *back = malloc(dense);
    uint32_t *offsets = malloc(slots * sizeof *offsets);
    int64_t kept, found;
    for (size_t i = 0; i < dense; ++i) from[i] = drawn() % 2 ? (uint8_t)shape.zero_point : (uint8_t)drawn();
    int64_t bytes = pw_sparse_pack(&shape, from, 0, NULL, offsets, &kept);
    uint8_t *stream = calloc((size_t)bytes + PW_SPARSE_TAIL, 1);
    pw_sparse_pack(&shape, from, 0, stream, offsets, &kept);
    if (pw_sparse_problem(&shape, stream, bytes + PW_SPARSE_TAIL, offsets, &found) || found != kept) exit(2);
    pw_sparse_unpack(&shape, stream, offsets, back);
    if (memcmp(from, back, dense)) exit(3);
    for (int hits = drawn() % 4; hits > 0; --hits) {
        if (drawn() % 2) stream[drawn() % (uint32_t)bytes] ^= (uint8_t)(1u << drawn() % 8);
        else offsets[drawn() % slots] = drawn() % 2 ? drawn() : UINT32_MAX;
    }
    int64_t told = drawn() % 4 ? bytes + PW_SPARSE_TAIL : PW_SPARSE_TAIL + drawn() % (uint32_t)bytes;
    if (!pw_sparse_problem(&shape, stream, told, offsets, &found)) pw_sparse_unpack(&shape, stream, offsets, back);
    free(from), free(back), free(offsets), free(stream);
}

int main(void) {
    for (int i = 0; i < 3000; ++i) one(i % 2 ? PW_Q8 : PW_BF16);
    puts("ok");
    return 0;
}
