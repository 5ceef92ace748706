/* The words of simd/amx.h in C, over the portable vocabulary: what each instruction computes (Intel SDM, volume 2),
 * and the faults of a real unit as an end of the process with a word on stderr. */
#pragma GCC diagnostic ignored "-Wunused-function" /* not every family has words for them */
#include <stdio.h>
#include <stdlib.h>

#include "simd/portable.h"

extern int emulated_tiles_granted; /* by the system, which would end a process that touches a tile without */

/* Subnormals count as zero on the way in and out. */
static float without_subnormals(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* a b + c, which is tiny where its rounding to 24 bits is: 2^-126 may have been rounded to the fewer bits of a subnormal, and
 * is seen to be less where there is room below it. */
static float flushed_fma(float a, float b, float c) {
    float sum = fmaf(a, b, c);
    int is_less = fabsf(sum) == 0x1p-126f && fabsf(fmaf(a * 0x1p40f, b, c * 0x1p40f)) < 0x1p-86f;
    return is_less ? copysignf(0.0f, sum) : without_subnormals(sum);
}

/* vcvtne2ps2bf16, and the permutation of simd/amx.h. */
#define PW_BF16_PAIRS 1
PW_INLINE vi bf16_pairs(vf even, vf odd) {
    vi pairs = vi_set1(0);
    for (int i = 0; i < LANES; ++i) {
        uint32_t upper = pw_to_bf16(without_subnormals(odd[i]));
        pairs[i] = (int32_t)(upper << 16 | pw_to_bf16(without_subnormals(even[i])));
    }
    return pairs;
}

/* vpsubw and vpmullw. */
PW_INLINE vi scaled_halves(vi codes, vi zeros, vi subs) {
    vu low = ((vu)codes - (vu)zeros) * (vu)subs & 0xFFFF;
    vu high = (((vu)codes >> 16) - ((vu)zeros >> 16)) * ((vu)subs >> 16) << 16;
    return (vi)(low | high);
}

typedef struct {
    int rows, row_bytes;
    uint8_t data[16][64];
} emulated_tile;

__attribute__((weak)) __thread emulated_tile emulated[8]; /* weak: one for all units */
__attribute__((weak)) __thread int emulated_configured;

static void tile_fault(const char *what) {
    fprintf(stderr, "tile unit: %s\n", what);
    _Exit(4);
}

/* The 64 bytes that ldtilecfg reads: palette, start row, 14 zeros, 16-bit row lengths, row counts. */
static void emulated_configure(const void *config) {
    const uint8_t *bytes = config;
    if (!emulated_tiles_granted) tile_fault("used without permission");
    if (bytes[0] != 1 || bytes[1] != 0) tile_fault("not palette 1 from row 0");
    for (int i = 2; i < 16; ++i) {
        if (bytes[i]) tile_fault("reserved bytes are set");
    }
    for (int i = 0; i < 16; ++i) {
        int row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, rows = bytes[48 + i];
        if (i >= 8 && (row_bytes || rows)) tile_fault("a ninth tile");
        if (i >= 8) continue;
        if (row_bytes > 64 || rows > 16 || !row_bytes != !rows) tile_fault("a shape that no tile has");
        emulated[i] = (emulated_tile){.rows = rows, .row_bytes = row_bytes};
    }
    emulated_configured = 1;
}

static emulated_tile *tile_of(int i) {
    if (!emulated_configured || !emulated[i].rows) tile_fault("a tile without a shape");
    return &emulated[i];
}

static void emulated_load(int i, const void *p, int64_t stride) {
    emulated_tile *t = tile_of(i);
    memset(t->data, 0, sizeof t->data);
    for (int r = 0; r < t->rows; ++r) memcpy(t->data[r], (const uint8_t *)p + r * stride, (size_t)t->row_bytes);
}

static void emulated_store(int i, void *p, int64_t stride) {
    emulated_tile *t = tile_of(i);
    for (int r = 0; r < t->rows; ++r) memcpy((uint8_t *)p + r * stride, t->data[r], (size_t)t->row_bytes);
}

static void emulated_zero(int i) { memset(tile_of(i)->data, 0, sizeof emulated[i].data); }

/* c (rows of a, row length of b) += a b, whose shapes must meet. */
static void shapes_must_meet(const emulated_tile *c, const emulated_tile *a, const emulated_tile *b) {
    if (c->rows != a->rows || c->row_bytes != b->row_bytes || a->row_bytes != 4 * b->rows) {
        tile_fault("shapes that do not meet");
    }
}

static float bf16_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return without_subnormals(pw_from_bf16(half));
}

static void emulated_dot_bf16(int ci, int ai, int bi) {
    emulated_tile *c = tile_of(ci), *a = tile_of(ai), *b = tile_of(bi);
    shapes_must_meet(c, a, b);
    for (int m = 0; m < c->rows; ++m) {
        for (int n = 0; n < c->row_bytes / 4; ++n) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < b->rows; ++k) {
                even = flushed_fma(bf16_at(a->data[m] + 4 * k), bf16_at(b->data[k] + 4 * n), even);
                odd = flushed_fma(bf16_at(a->data[m] + 4 * k + 2), bf16_at(b->data[k] + 4 * n + 2), odd);
            }
            memcpy(&sum, c->data[m] + 4 * n, sizeof sum);
            sum = without_subnormals(without_subnormals(sum) + without_subnormals(even + odd));
            memcpy(c->data[m] + 4 * n, &sum, sizeof sum);
        }
    }
}

static void emulated_dot_int8(int ci, int ai, int bi, int is_signed) {
    emulated_tile *c = tile_of(ci), *a = tile_of(ai), *b = tile_of(bi);
    shapes_must_meet(c, a, b);
    for (int m = 0; m < c->rows; ++m) {
        for (int n = 0; n < c->row_bytes / 4; ++n) {
            uint32_t sum;
            memcpy(&sum, c->data[m] + 4 * n, sizeof sum);
            for (int i = 0; i < a->row_bytes; ++i) {
                uint8_t weight = b->data[i / 4][4 * n + i % 4];
                sum += (uint32_t)((int8_t)a->data[m][i] * (is_signed ? (int8_t)weight : weight));
            }
            memcpy(c->data[m] + 4 * n, &sum, sizeof sum);
        }
    }
}

static void emulated_release(void) { emulated_configured = 0; }

__attribute__((destructor)) static void everything_was_given_back(void) {
    if (emulated_configured) tile_fault("still in use at the end");
}

#define TILE_CONFIGURE(config) emulated_configure(&(config))
#define TILE_RELEASE() emulated_release()
#define TILE_LOAD(t, p, stride) emulated_load(t, p, stride)
#define TILE_LOAD_ONCE(t, p, stride) emulated_load(t, p, stride)
#define TILE_STORE(t, p, stride) emulated_store(t, p, stride)
#define TILE_ZERO(t) emulated_zero(t)
#define TILE_DOT_BF16(c, a, b) emulated_dot_bf16(c, a, b)
#define TILE_DOT_INT8(c, a, b) emulated_dot_int8(c, a, b, 0)
#define TILE_DOT_SIGNED(c, a, b) emulated_dot_int8(c, a, b, 1)

#include "simd/tiles.h"
