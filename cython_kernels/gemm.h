/* Packed matrix products y = x W^T: what a weight, a prepared row and a schedule are.
 *
 * A weight is W[n][k] in panels of PW_PANEL outputs (layouts: packing.py). Rows of x are first put into the form
 * that a weight's kernel reads (prepare_rows), once per form and row; any thread may prepare any rows. Then each
 * thread calls gemm for its share, a range of rows times a range of panels. Nothing inside synchronises.
 *
 * The arithmetic of a product is its compute path and its number of k parts, both fields of the weight: every
 * y[row][column] is accumulated in the one order that they name, whatever M, the shares and the schedule are. On one
 * ISA the result is the same bit for bit. */
#ifndef PHASEWISE_GEMM_H
#define PHASEWISE_GEMM_H

#include <stdint.h>

#include "blocks.h"

enum { PW_PANEL = 16, PW_K_MULTIPLE = 32, PW_BLOCK_INPUTS = 256, PW_MAX_K_PARTS = 64 };
enum { PW_MOST_TILE = 32 }; /* no micro-kernel has more rows or more panels */
/* Bytes of panels and sums that stay in L1 while the tile unit loads rows through it. */
enum { PW_TILE_L1_BYTES = 40 << 10 };

/* How weights and activations meet. Names: pw_path_name. A path that an ISA lacks is its default one for the kind. */
typedef enum {
    PW_FMA,       /* float32 multiply-adds of widened weights */
    PW_F16_FMA,   /* float16 multiply-adds over short chains, those summed in float32 */
    PW_BF16_DOT,  /* pairs of bf16, summed in float32 */
    PW_BF16_TILE, /* the same on the tile unit */
    PW_INT8_DOT,  /* bytes times rows quantised to bytes, exact in int32 within a group */
    PW_INT8_TILE,
    PW_INT8_BLOCK, /* bytes times rows with one scale for 256 inputs: sub-scales of blocks apply in integers */
    PW_PATHS
} pw_path;

typedef enum { PW_STORE, PW_ADD } pw_epilogue; /* y = x W^T, or y = y + x W^T (the finished sum is added once) */

typedef struct {
    int32_t kind;        /* pw_kind */
    int32_t group;       /* inputs that share a scale: 16, 32 or 0, all of k (q8), 32 (q4), of a block, 0 otherwise */
    int32_t zero_point;  /* 0..255; 0 where there are mins */
    int32_t scale_bytes; /* 2: float16 scales and mins, 4: float32, 0: no scales */
    int32_t path;        /* pw_path; -1: the ISA's default for the kind */
    int32_t top_exponent; /* bf16: the exponent field of the largest magnitude, 255: not finite; otherwise 0 */
    int32_t k_parts;     /* 1..PW_MAX_K_PARTS: k is summed in k_parts parts, whose sums are added in order */
    int64_t n, k;        /* outputs and inputs, before padding */
    const void *values;  /* panels, see packing.py and blocks.py; no alignment is assumed. Sparse: the stream, see sparse.h */
    const uint32_t *offsets; /* sparse: [panels][slots], see sparse.h; NULL: the weight is stored dense */
    const void *scales;  /* [panels][padded k / group][16]; PW_E4M3: factors [panels][2][16]; NULL: blocks hold their own */
    const void *mins;    /* like scales, or NULL */
} pw_weight;

/* Bytes of one panel of a weight's values, as dense kernels read them. */
static inline int64_t pw_panel_bytes(const pw_weight *w) {
    int64_t k = (w->k + PW_K_MULTIPLE - 1) / PW_K_MULTIPLE * PW_K_MULTIPLE;
    if (!pw_in_blocks(w->kind)) return k * PW_PANEL * 4 / pw_inputs_of_row(w->kind);
    pw_block_format f = pw_block_format_of(w->kind);
    return k / f.inputs * pw_block_bytes(f);
}

/* What rows must look like for a weight. Weights of equal form and k share prepared rows. */
typedef struct {
    int32_t kind, group, zero_point, path;
} pw_form;

/* Prepared rows; the layout inside a row belongs to the ISA that wrote it. For f32 this is x itself. */
typedef struct {
    const void *rows;
    int64_t row_bytes; /* from one row to the next, at least row_bytes(form, k) */
} pw_activations;

typedef struct {
    int64_t begin, end;
} pw_range;

typedef enum { PW_LOOP_NM, PW_LOOP_MN } pw_loop_order; /* outermost first: panel blocks outside row blocks, or inside */

/* How to walk a product, by the names of kerneldb.records.Schedule. Any values are safe: gemm clamps them to what exists.
 * They change speed, never results. */
typedef struct {
    int32_t mr, panels;           /* micro-kernel: rows x panels of 16 */
    int32_t block_m;              /* rows that meet a panel block before the next one is taken */
    int32_t block_n;              /* columns, of whole panels, that stay in L2 while the rows pass */
    int32_t block_k;              /* inputs per pass, so that a tile's weights stay in L1; dense bf16 on the tile unit: if they
                                   * do not, its part sums do */
    int32_t prefetch_bytes;       /* how far ahead of a panel's reads its lines are asked for; 0: not at all */
    int32_t threads_m, threads_n; /* over rows and over panels */
    int32_t threads_k;            /* 1, or the weight's k_parts: each part has threads of its own */
    int32_t loop_order;           /* pw_loop_order */
} pw_schedule;

static inline int64_t pw_panels(int64_t n) { return (n + PW_PANEL - 1) / PW_PANEL; }
static inline int64_t pw_padded_k(int64_t k) { return (k + PW_K_MULTIPLE - 1) / PW_K_MULTIPLE * PW_K_MULTIPLE; }

static inline pw_form pw_form_of(const pw_weight *w) {
    if (w->path == PW_INT8_BLOCK && pw_has_subs(w->kind)) return (pw_form){PW_Q8, PW_BLOCK_INPUTS, 0, w->path};
    return (pw_form){pw_arithmetic_kind(w->kind), w->group, w->zero_point, w->path};
}

/* `fma`, `bf16_dot`, ..: what databases and people call a path; NULL past the last. */
const char *pw_path_name(int path);

/* Part `part` of w->k_parts: a range of inputs that begins and ends on multiples of PW_K_MULTIPLE, or at k. */
pw_range pw_k_part(const pw_weight *w, int32_t part);

/* NULL, or what is wrong with the fields of a weight (the arrays' sizes are the caller's to check). */
const char *pw_weight_problem(const pw_weight *w);

/* A schedule that needs no tuning: small M streams weights, large M blocks for the caches. */
pw_schedule pw_default_schedule(const pw_weight *w, int64_t m, int32_t threads);

/* The part of y[m][n] that `thread` of threads_m * threads_n computes; empty ranges where there are too few pieces. */
void pw_share(const pw_schedule *s, const pw_weight *w, int64_t m, int32_t thread, pw_range *rows, pw_range *panels);

/* The monotonic clock. */
int64_t pw_now_ns(void);

#endif
