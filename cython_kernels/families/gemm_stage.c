/* families/gemm_stage.c: what many rows read of quantised panels, unpacked once for all of them; compiled once per ISA.
 *
 * Nibbles become bytes (where q4 rows look like q8 rows), float16 scales and minima float32: exact, so a staged product
 * equals a direct one bit for bit. The stage stays in L1 or L2 while a block of rows passes. */
#include "families/gemm.h"

enum { STAGED_INPUTS = 4096, NIBBLES_STAGED = Q8_ACTIVATION_BYTES == 1 }; /* inputs of all panels of a stage */

typedef struct {
    uint8_t bytes[STAGED_INPUTS * PW_PANEL] __attribute__((aligned(64)));
    float scales[STAGED_INPUTS], offsets[STAGED_INPUTS], mins[STAGED_INPUTS]; /* 16 for each group of 16 or more */
} panel_stage;

/* float16 or float32 [panels][t->steps][16] to float32. */
static void stage_floats(const tile_call *t, const uint8_t *from, int64_t panels, float *to) {
    for (int64_t panel = 0; panel < panels; ++panel, from += t->panel_scale_bytes) {
        for (int64_t i = 0; i < t->steps * PW_PANEL; i += LANES, to += LANES) {
            const void *p = from + i * t->scale_bytes;
            v_store(to, t->scale_bytes == 2 ? v_load_f16((const uint16_t *)p) : v_load((const float *)p));
        }
    }
}

#if PW_FMA_ROUNDS_ONCE
/* -FLOAT_BIAS times each scale; whether all of them are exact. */
static int stage_offsets(const float *scales, int64_t count, float *offsets) {
    vf bias = v_set1(-FLOAT_BIAS);
    vi rounded = vi_set1(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vf s = v_load(scales + i), offset = v_mul(bias, s);
        v_store(offsets + i, offset);
        rounded = vi_or(rounded, v_bits(v_fma(s, v_set1(FLOAT_BIAS), offset)));
    }
    return vi_max_all(vi_and(rounded, vi_set1(0x7FFFFFFF))) == 0;
}
#else
static int stage_offsets(const float *scales, int64_t count, float *offsets) {
    (void)scales, (void)count, (void)offsets;
    return 0;
}
#endif

/* q4 [panels][t->steps][4][16][4] to q8 [panels][t->steps][8][16][4]. */
static void stage_nibbles(const tile_call *t, int64_t panels, uint8_t *to) {
    vi nibble = vi_set1(0x0F0F0F0F);
    int64_t vector_rows = t->steps * PW_K_MULTIPLE / inputs_per_vector_row(PW_Q4);
    for (int64_t panel = 0; panel < panels; ++panel) {
        const uint8_t *from = t->values + panel * t->panel_bytes;
        for (int64_t i = 0; i < vector_rows; ++i, from += VECTOR_ROW_BYTES, to += 2 * VECTOR_ROW_BYTES) {
            PW_UNROLL for (int v = 0; v < VECTOR_ROW_BYTES; v += LANES * 4) {
                vi pairs = vi_load(from + v);
                vi_store(to + v, vi_and(pairs, nibble));
                vi_store(to + VECTOR_ROW_BYTES + v, vi_and(vi_shr(pairs, 4), nibble));
            }
        }
    }
}

/* Puts what a call is to read into `stage`, and the call onto it. */
static void stage_panels(tile_call *t, int kind, int group, int64_t panels, panel_stage *stage) {
    int64_t floats = panels * t->steps * PW_PANEL;
    (void)group;
    stage_floats(t, t->scales, panels, stage->scales);
    if (t->mins) stage_floats(t, t->mins, panels, stage->mins);
    if (stage_offsets(stage->scales, floats, stage->offsets)) t->offsets = (const uint8_t *)stage->offsets;
    t->scales = (const uint8_t *)stage->scales;
    if (t->mins) t->mins = (const uint8_t *)stage->mins;
    t->scale_bytes = sizeof(float);
    t->panel_scale_bytes = t->steps * PW_PANEL * (int64_t)sizeof(float);
    t->prefetch_bytes = t->prefetch_jump = 0;
    if (kind != PW_Q4 || !NIBBLES_STAGED) return;
    stage_nibbles(t, panels, stage->bytes);
    t->values = stage->bytes;
    t->panel_bytes = t->steps * PW_K_MULTIPLE * PW_PANEL;
}
