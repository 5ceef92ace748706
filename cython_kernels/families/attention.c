/* Causal attention of a few query rows over chunks of PW_CHUNK positions of one KV head.
 *
 * Chunk c covers positions [128 c, 128 c + 128) of the sequence, wherever its slots lie. For each row:
 *     s_j = q . k_j                    one chain of multiply-adds over the head's dimensions
 *     top = max s_j,  w_j = exp(s_j - top),  sum = sum w_j,  values = sum w_j v_j  (one chain over j)
 * and chunks are merged in order (merge). Every step of it looks at one row alone and depends on positions only, so
 * a row's result is the same bit for bit whether it comes alone (decode), in a tile (prefill) or in pieces.
 * Positions that a row does not see get weight exactly 0, which changes no sum.
 *
 * Error against float64, with S = max |q| |k| (2-norms), over n positions: each weight is off by a factor
 * 1 + d, |d| <= ((head_dim + 4) S + 4) * 2^-23, hence |error| <= (2 d + (n + 2 n / PW_CHUNK + 4) * 2^-23) * max |v_j|.
 * Keys and values stored as float16 are off by up to 2^-11 of themselves before that, as bfloat16 by 2^-8.
 *
 * int8: a key is scale * c, c integers up to 127, scale = max |k| / 127, and so is a value; in int16 c is at most
 * pw_key_limit or PW_VALUE_LIMIT. attention/pairs.c multiplies them, and has the bound for keys and values as they are
 * stored. Those are off by up to e = 0.5001 scale in every element: a score by d_k = e_k sum |q_i|, the result by
 * (exp(2 max d_k) - 1) max |v_j| + max e_v.
 *
 * int4: 32 numbers are minimum + scale * c, c integers from 0 to 15, computed in float32 by one rounding (scale and
 * minimum are bfloat16: the product is exact); then they are multiplied as float32 storage is, bit for bit. They are
 * off by up to e = 0.5001 scale + 2^-23 max |x|, and scale <= (max x - min x + 2^-7 |min x|) / 15 * (1 + 2^-7),
 * because the minimum is rounded down and the scale up; where that is below 2^-100, scale = 0 and e = 2^-100. */
#include "families/attention/fours.h"
#include "families/attention/pairs.h"
#include "families/attention/stored.h"
#include "families/byte_scale.h"
#include "families/exp.h"
#include "families/sixteen.h"
#include "families/slots.h"

#include "families/attention/weights.c"

typedef struct {
    const void *data;
    int64_t step;       /* elements from one k to the next */
    int64_t panel_step; /* elements from one panel of 16 columns to the next */
    const char *wanted; /* what else to ask for meanwhile, into L2, as much as is read; NULL: nothing */
} matrix;

typedef void (*attend_function)(int64_t steps, const float *a, const matrix *b, float *c, int64_t c_stride);

/* c[r][column] = sum over k of a[r][k] * b[k][column]; rows of a are a_stride floats apart. */
PW_INLINE void attend_product(const int rows, const int panels, const int format, const int a_stride, int64_t steps,
                              const float *a, const matrix *b, float *c, int64_t c_stride) {
    enum { PER_PANEL = PW_PANEL / LANES };
    const int64_t bytes = pw_kv_element_bytes(format), asked = PW_PANEL * panels * bytes;
    vf sum[ATTEND_ROWS][ATTEND_PANELS * PER_PANEL];
    int64_t step = b->step, panel_step = b->panel_step;
    const char *data = b->data, *wanted = b->wanted;
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) sum[r][v] = v_zero();
    for (int64_t k = 0; k < steps; ++k, data += step * bytes) {
        if (format != PW_KV_F32 && wanted)
            PW_UNROLL for (int64_t line = 0; line < asked; line += 64) __builtin_prefetch(wanted + k * asked + line, 0, 2);
        vf x[ATTEND_PANELS * PER_PANEL];
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v)
            x[v] = v_load_stored(data + (v / PER_PANEL * panel_step + v % PER_PANEL * LANES) * bytes, format);
        PW_UNROLL for (int r = 0; r < rows; ++r) {
            vf factor = v_set1(a[r * a_stride + k]);
            PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) sum[r][v] = v_fma(factor, x[v], sum[r][v]);
        }
    }
    PW_UNROLL for (int r = 0; r < rows; ++r)
        PW_UNROLL for (int v = 0; v < panels * PER_PANEL; ++v) v_store(c + r * c_stride + v * LANES, sum[r][v]);
}

/* What tiles read b as: a format (int4 is widened first), or float32 whose products are with rows of latent vectors. */
enum { WITH_LATENT = PW_KV_BF16 + 1, READINGS };
#define ATTEND(ROWS, PANELS, NAME, FORMAT, STRIDE)                                                           \
    static void attend_##ROWS##_##PANELS##_##NAME(int64_t steps, const float *a, const matrix *b, float *c,  \
                                                  int64_t c_stride) {                                        \
        attend_product(ROWS, PANELS, PW_KV_##FORMAT, STRIDE, steps, a, b, c, c_stride);                      \
    }
#define ATTEND_READINGS(ROWS, PANELS)                                                               \
    ATTEND(ROWS, PANELS, F32, F32, PW_ROW_STRIDE) ATTEND(ROWS, PANELS, F16, F16, PW_ROW_STRIDE)     \
    ATTEND(ROWS, PANELS, BF16, BF16, PW_ROW_STRIDE) ATTEND(ROWS, PANELS, LATENT, F32, PW_LATENT_STRIDE)
#define ATTEND_NAMES(ROWS, PANELS)                                                               \
    [(ROWS)-1][(PANELS)-1] = {attend_##ROWS##_##PANELS##_F32, attend_##ROWS##_##PANELS##_F16,    \
                              attend_##ROWS##_##PANELS##_BF16, attend_##ROWS##_##PANELS##_LATENT},
EACH_TILE(ATTEND_READINGS)
static const attend_function attend_tiles[ATTEND_ROWS][ATTEND_PANELS][READINGS] = {EACH_TILE(ATTEND_NAMES)};

static void attend_multiply(int rows, int64_t panels, int reading, int64_t steps, const float *a, matrix b, float *c,
                            int64_t c_stride) {
    int64_t bytes = pw_kv_element_bytes(reading == WITH_LATENT ? PW_KV_F32 : reading);
    int64_t most = rows <= WIDE_ROWS ? ATTEND_PANELS : NARROW_PANELS;
    for (int64_t done = 0; done < panels;) {
        int now = (int)(panels - done < most ? panels - done : most);
        attend_tiles[rows - 1][now - 1][reading](steps, a, &b, c + done * PW_PANEL, c_stride);
        b.data = (const char *)b.data + now * b.panel_step * bytes;
        if (b.wanted) b.wanted += steps * now * PW_PANEL * bytes;
        done += now;
    }
}

/* ---- one tile of rows over one chunk ---------------------------------------------------------------------------- */

/* Where a chunk's keys and values are: the cache itself, or float32 copies that begin at the same slots. */
typedef struct {
    matrix keys, values;     /* the panel of the first slot needed; the row of the first slot needed */
    int64_t first_slot;
    int format;              /* as they lie there */
} chunk_data;

/* origin: slot of the chunk's first position. */
static void attend_tile(const pw_kv_head *head, const pw_queries *queries, int row, int rows, int64_t chunk,
                        int64_t origin, const chunk_data *data, float *scores, pw_partial out) {
    int64_t bytes = pw_kv_element_bytes(data->format);
    span own[ATTEND_ROWS], all = NOTHING;
    for (int r = 0; r < rows; ++r) all = seen_by_either(all, own[r] = seen_by_row(queries, row + r, chunk));
    matrix keys = data->keys, values = data->values;
    values.data = (const char *)values.data + (origin + all.begin - data->first_slot) * values.step * bytes;
    if (all.begin < all.end) {
        int64_t panel = (origin + all.begin) / PW_PANEL, end_panel = (origin + all.end - 1) / PW_PANEL + 1;
        int64_t panels_before = panel - data->first_slot / PW_PANEL;
        keys.data = (const char *)keys.data + panels_before * keys.panel_step * bytes;
        if (data->format != PW_KV_F32) keys.wanted = values.data;
        float *first = scores + panel * PW_PANEL - origin;
        attend_multiply(rows, end_panel - panel, data->format, head->head_dim,
                        queries->q + (int64_t)row * PW_ROW_STRIDE, keys, first, PW_ROW_STRIDE);
        if (queries->cap > 0)
            for (int r = 0; r < rows; ++r)
                ISA(cap)((end_panel - panel) * PW_PANEL, queries->cap, first + r * PW_ROW_STRIDE, first + r * PW_ROW_STRIDE);
        for (int r = 0; r < rows && queries->slopes; ++r)
            lower_by_distance(queries, row + r, own[r], chunk, scores + r * PW_ROW_STRIDE);
    }
    weigh(scores, own, rows, all, out.top + row, out.sum + row);
    if (data->format != PW_KV_F32) values.wanted = queries->next_keys;
    attend_multiply(rows, head->value_dim / PW_PANEL, data->format, all.end - all.begin, scores + all.begin, values,
                    out.values + (int64_t)row * head->value_dim, head->value_dim);
}

#define WIDEN(FORMAT)                                                                            \
    case PW_KV_##FORMAT:                                                                         \
        for (int64_t i = 0; i < n; i += LANES, p += LANES * pw_kv_element_bytes(PW_KV_##FORMAT)) \
            v_store(to + i, v_load_stored(p, PW_KV_##FORMAT));                                   \
        break;
/* n is whole vectors. */
static void widen(int format, int64_t n, const void *from, float *to) {
    const char *p = from;
    switch (format) { WIDEN(F32) WIDEN(F16) WIDEN(BF16) }
}

#include "families/attention/pairs.c"
#include "families/attention/latent.c"

/* ---- chunks ----------------------------------------------------------------------------------------------------- */

/* Panels of keys in int4: words of 16 slots side by side. */
static void widen_int4_keys(int64_t panels, int64_t head_dim, const uint32_t *from, float *to) {
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t i = 0; i < head_dim; from += PW_PANEL) {
            int64_t end = i + PW_KV_GROUP < head_dim ? i + PW_KV_GROUP : head_dim;
            const uint32_t *header = from;
            for (; i < end; i += PW_KV_CODES_PER_WORD, to += PW_KV_CODES_PER_WORD * PW_PANEL) {
                from += PW_PANEL;
                for (int64_t lane = 0; lane < PW_PANEL; lane += LANES) {
                    vf scale = v_low_bf16(header + lane), least = v_high_bf16(header + lane);
                    PW_UNROLL for (int code = 0; code < PW_KV_CODES_PER_WORD; ++code)
                        v_store(to + code * PW_PANEL + lane, v_fma(v_codes_of_words(from + lane, code), scale, least));
                }
            }
            to -= (i - end) * PW_PANEL; /* the codes after the last dimension are overwritten by the next panel */
            i = end;
        }
}

/* Rows of values in int4. */
static void widen_int4_values(int64_t slots, int64_t value_dim, const uint32_t *from, float *to) {
    for (int64_t slot = 0; slot < slots; ++slot)
        for (int64_t i = 0; i < value_dim; ) {
            int64_t end = i + PW_KV_GROUP < value_dim ? i + PW_KV_GROUP : value_dim;
            vf scale = v_set1(pw_from_bf16((uint16_t)*from)), least = v_set1(pw_from_bf16((uint16_t)(*from >> 16)));
            for (++from; i < end; i += PW_PANEL, from += PW_PANEL / PW_KV_CODES_PER_WORD, to += PW_PANEL)
                PW_UNROLL for (int first = 0; first < PW_PANEL; first += LANES)
                    v_store(to + first, v_fma(v_codes(from, first), scale, least));
        }
}

/* What is no float32 is converted, once for all tiles of rows that read the chunk. */
static chunk_data widened(const pw_kv_head *head, chunk_data from, int64_t slots, float *keys, float *values) {
    int64_t lead = from.first_slot % PW_PANEL, panels = (lead + slots + PW_PANEL - 1) / PW_PANEL;
    if (from.format == PW_KV_INT4) {
        widen_int4_keys(panels, head->head_dim, from.keys.data, keys);
        widen_int4_values(slots, head->value_dim, from.values.data, values);
    } else {
        widen(from.format, panels * PW_PANEL * head->head_dim, from.keys.data, keys);
        widen(from.format, slots * head->value_dim, from.values.data, values);
    }
    from.keys.data = keys;
    from.values.data = values;
    from.format = PW_KV_F32;
    return from;
}

void ISA(prepare_queries)(int32_t format, int32_t head_dim, int32_t rows, float *q) {
    if (pw_kv_has_scales(format)) round_queries(head_dim, rows, q);
}

void ISA(attend_chunk)(const pw_kv_head *head, const pw_queries *queries, int64_t chunk, int64_t origin,
                              float *scratch, pw_partial out) {
    span all = NOTHING;
    int64_t bytes = pw_kv_element_bytes(head->format);
    for (int row = 0; row < queries->rows; ++row) all = seen_by_either(all, seen_by_row(queries, row, chunk));
    int most = queries->tile_rows > 0 && queries->tile_rows < ATTEND_ROWS ? queries->tile_rows : ATTEND_ROWS;
    if (head->stride) {
        attend_chunk_latent(head, queries, most, all, chunk, origin, scratch, out);
        return;
    }
    if (pw_kv_has_scales(head->format)) {
        attend_chunk_pairs(head, queries, most, all, chunk, origin, scratch, out);
        return;
    }
    int64_t slot = origin + all.begin, key_bytes = pw_kv_elements(head->format, head->head_dim) * bytes;
    int64_t value_bytes = pw_kv_elements(head->format, head->value_dim) * bytes;
    chunk_data data = {
        .keys = {(const char *)head->keys + slot / PW_PANEL * PW_PANEL * key_bytes, PW_PANEL,
                 (int64_t)PW_PANEL * head->head_dim, NULL},
        .values = {(const char *)head->values + slot * value_bytes, head->value_dim, PW_PANEL, NULL},
        .first_slot = slot,
        .format = head->format,
    };
    float *keys = scratch + ATTEND_ROWS * PW_ROW_STRIDE, *values = keys + (PW_CHUNK + PW_PANEL) * head->head_dim;
    int widens = head->format == PW_KV_INT4 || (head->format != PW_KV_F32 && queries->rows > ATTEND_ROWS);
    if (widens && all.begin < all.end)
        data = widened(head, data, all.end - all.begin, keys, values);
    else if (widens) data.format = PW_KV_F32; /* no row sees any of it, and int4 has no tiles of its own */
    for (int row = 0; row < queries->rows; row += most) {
        int rows = queries->rows - row < most ? queries->rows - row : most;
        attend_tile(head, queries, row, rows, chunk, origin, &data, scratch + LEAD, out);
    }
}

/* What two parts weigh when their maxima differ: top = max, and each part's factor exp(own top - top). */
static void rescale(int rows, pw_partial part, pw_partial into, float *part_factor, float *into_factor) {
    vf old = v_load_n(into.top, rows), new = v_load_n(part.top, rows), top = v_max(old, new);
    vf of_old = v_exp(v_sub(old, top)), of_new = v_exp(v_sub(new, top));
    v_store(into_factor, of_old);
    v_store(part_factor, of_new);
    v_store_n(into.top, top, rows);
    vf sum = v_fma(v_load_n(into.sum, rows), of_old, v_mul(v_load_n(part.sum, rows), of_new));
    v_store_n(into.sum, sum, rows);
}

void ISA(merge)(int32_t rows, int32_t value_dim, pw_partial part, pw_partial into) {
    for (int32_t row = 0; row < rows; row += LANES) {
        float of_part[LANES], of_into[LANES];
        int now = rows - row < LANES ? rows - row : LANES;
        pw_partial from = {part.top + row, part.sum + row, NULL}, to = {into.top + row, into.sum + row, NULL};
        rescale(now, from, to, of_part, of_into);
        for (int r = 0; r < now; ++r) {
            const float *x = part.values + (int64_t)(row + r) * value_dim;
            float *y = into.values + (int64_t)(row + r) * value_dim;
            for (int32_t i = 0; i < value_dim; i += LANES)
                v_store(y + i, v_fma(v_load(y + i), v_set1(of_into[r]), v_mul(v_load(x + i), v_set1(of_part[r]))));
        }
    }
}

void ISA(begin)(int32_t rows, int32_t value_dim, pw_partial out) {
    fill(out.top, 0, rows, NOTHING_SEEN);
    fill(out.sum, 0, rows, 0.0f);
    fill(out.values, 0, (int64_t)rows * value_dim, 0.0f);
}

void ISA(finish)(int32_t head_dim, float sum, const float *values, float *out) {
    vf factor = v_set1(1.0f / sum);
    for (int32_t i = 0; i < head_dim; i += LANES) {
        int count = head_dim - i < LANES ? head_dim - i : LANES;
        v_store_n(out + i, v_mul(v_load_n(values + i, count), factor), count);
    }
}

#include "families/attention/cache.c"
