/* What is the same for every ISA: checking a weight's fields, the schedule that needs no tuning, a thread's share. */
#include "cpu.h"
#include "dispatch.h"
#include "sparse.h"
#include "team/waiting.h"

#include <stddef.h>

enum { MOST_COLUMN_INPUTS = 65536 }; /* 255 * 127 times as much is an int32 */

static const char *block_problem(const pw_weight *w) {
    pw_block_format f = pw_block_format_of(w->kind);
    if (w->k % f.inputs) return "k is not a multiple of the block";
    if (w->group != f.group || w->zero_point != f.zero_point) return "group or zero_point is not the block's";
    if (f.scaling == PW_E4M3 && (!w->scales || w->scale_bytes != 4)) return "factors of outputs must be float32";
    return (w->scales && f.scaling != PW_E4M3) || w->mins ? "scales beside blocks" : NULL;
}

static const char *quant_problem(const pw_weight *w) {
    if (pw_in_blocks(w->kind)) return block_problem(w);
    int column = w->kind == PW_Q8 && w->group == 0;
    if (w->group != 32 && !(w->kind == PW_Q8 && w->group == 16) && !column) return "group must be 32, or 16 or 0 for q8";
    if (column && w->mins) return "a column with one scale has no minima";
    if (column && w->k > MOST_COLUMN_INPUTS) return "a column with one scale has at most 65536 inputs";
    if (w->scale_bytes != 2 && w->scale_bytes != 4) return "scales must be float16 or float32";
    if (w->zero_point < 0 || w->zero_point > 255) return "zero_point must lie in 0..255";
    if (w->mins && w->zero_point) return "a weight with minima has zero_point 0";
    return w->scales ? NULL : "scales are missing";
}

const char *pw_weight_problem(const pw_weight *w) {
    if (w->kind < 0 || w->kind >= PW_KINDS) return "there is no such kind";
    if (w->n < 1 || w->k < 1 || w->n > INT32_MAX || w->k > INT32_MAX) return "n and k must lie in 1..2^31";
    if (!w->values) return "values are missing";
    if (w->path < -1 || w->path >= PW_PATHS) return "there is no such compute path";
    if (w->k_parts < 1 || w->k_parts > PW_MAX_K_PARTS) return "k_parts must lie in 1..64";
    if (w->top_exponent < 0 || w->top_exponent > 255) return "top_exponent must lie in 0..255";
    if (w->path == PW_F16_FMA && w->top_exponent == 255) return "float16 holds no weights that are not finite";
    if (w->offsets && !pw_can_be_sparse(w->kind)) return "bf16 and q8 alone can be sparse";
    if (w->kind >= PW_Q8) return quant_problem(w);
    return w->group || w->zero_point || w->scales || w->mins ? "a dense weight has no groups" : NULL;
}

enum {
    L1_WEIGHT_BYTES = 28 << 10, /* a tile's weights in one pass over k, of 32 or 48 KiB */
    L2_WEIGHT_BYTES = 384 << 10,
    DENSE_PASS_INPUTS = 768,    /* dense weights come from L2 fast enough; longer passes store sums less often */
    BYTE_PASS_INPUTS = 2048,    /* BLOCK_ROWS rows of such a pass stay in an L2 of 1 MiB */
    BLOCK_ROWS = 256,
    BLOCK_PANELS = 16,
    PLANE_PASS_INPUTS = 1024,    /* of blocks on the tile unit: both planes of a panel, 34 KiB, stay in L1 */
    TILE_BLOCK_PANELS = 32, /* of the tile unit: wider blocks read rows from beyond L2 less often */
    STREAM_ROWS = 8, /* up to here the weights' arrival is the limit, not arithmetic */
    STREAM_AHEAD_BYTES = 2048,
    FAR_BYTES = 16384,
    OWN_ROWS = 64,         /* of a thread, at least, where it computes whole rows, */
    FEW_COLUMNS = 4,       /* at most, times m, */
    FEW_WEIGHTS = 1 << 20, /* and at most: every thread reads them all */
    GROUPS_AHEAD_BYTES = 4096, /* where only the first of several tiles of rows reads from memory */
    FAR_GROUPS_BYTES = 8192,
    SPARSE_AHEAD_BYTES = 2048,
    SPARSE_BLOCK_ROWS = 1024,  /* every block of rows expands the weights anew */
};

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

static int32_t path_in_use(const pw_weight *w) { return pw_active()->gemm.path_of(w->kind, w->group, w->path); }

/* What a pass over m rows reads of a weight value, in eighths of a byte: 32, 16, 8, 4, or what it is unpacked to. */
static int64_t value_eighths(const pw_weight *w, int64_t m) {
    int32_t path = path_in_use(w);
    if (w->kind == PW_FP8 && m <= STREAM_ROWS) return 8;
    if (w->kind >= PW_Q8 && path == PW_FMA) return 32;
    if (w->kind >= PW_Q8 && (path == PW_BF16_DOT || path == PW_BF16_TILE)) return 16;
    int nibbles = w->kind >= PW_Q4;
    return nibbles ? (m > STREAM_ROWS ? 8 : 4) : 32 / pw_inputs_of_row(w->kind);
}

/* Bits of a value as many rows read it, with its share of the float32 scales, minima and (gemm_quant.c) offsets of groups
 * that are staged for them. */
static int64_t pass_bits(const pw_weight *w, int64_t m) {
    int64_t bits = value_eighths(w, m);
    if (m <= STREAM_ROWS || !w->group || path_in_use(w) != PW_INT8_DOT) return bits;
    int has_mins = pw_in_blocks(w->kind) ? pw_has_mins(pw_block_format_of(w->kind)) : w->mins != NULL;
    return bits + 32 * (2 + has_mins) / w->group;
}

static int in_tiles(const pw_weight *w) {
    int32_t path = path_in_use(w);
    return path == PW_BF16_TILE || path == PW_INT8_TILE;
}

/* Whether a micro-kernel of so many rows is the tile unit's: vectors have none (gemm_blockwise.c). */
static int in_planes(const pw_weight *w, int32_t mr) { return path_in_use(w) == PW_INT8_BLOCK && mr > STREAM_ROWS; }

/* Float16 is staged in half the bytes of float32. */
static int64_t dense_pass_inputs(const pw_weight *w) {
    int32_t path = path_in_use(w);
    return path == PW_F16_FMA ? 2 * DENSE_PASS_INPUTS : DENSE_PASS_INPUTS;
}

/* Where tiles of integer dots lose nothing when L2 holds their weights. Weights that are unpacked to be wider are not
 * meant. */
static int bytes_arrive_from_l2(const pw_weight *w, int64_t m) {
    return pw_core()->slow_dots && w->kind >= PW_Q8 && value_eighths(w, m) <= 8;
}

/* Inputs per pass: as many as fit, in passes of nearly equal length. */
static int64_t pass_inputs(int64_t k, int64_t fitting) {
    int64_t passes = (k + fitting - 1) / fitting;
    return pw_padded_k((k + passes - 1) / passes);
}

/* Some cores stream a single row's weights fastest when no line is asked for ahead, perhaps because a request takes one
 * of the few places for misses of L1, which the core's own streams do not. With more rows, or nibbles, arithmetic keeps
 * the core from running ahead by itself, and lines are best asked for from afar, into L2; quantised panels one after the
 * other. */
static void stream_from_afar(const pw_weight *w, int64_t m, pw_schedule *s) {
    int quant = w->kind >= PW_Q8 && w->kind != PW_FP8;
    if (!pw_core()->streams_unaided || m > (quant ? STREAM_ROWS : 2 * STREAM_ROWS)) return;
    s->prefetch_bytes = m == 1 && w->kind < PW_Q4 ? 0 : FAR_BYTES;
    if (quant) s->panels = 1;
}

/* No core reads a stream by itself whose pace depends on what it holds. One row of a sparse weight takes several streams,
 * and the expansions of several panels, at once; with more rows the sums of a panel keep a core busy. */
static void stream_sparse(const pw_weight *w, int64_t m, pw_schedule *s) {
    s->prefetch_bytes = SPARSE_AHEAD_BYTES;
    if (m > STREAM_ROWS) s->block_m = SPARSE_BLOCK_ROWS;
    else if (w->kind >= PW_Q8) s->panels = m <= 2 ? 4 : m <= 4 ? 2 : 1;
}

/* Groups for many rows; bytes from where their arithmetic takes nearly as long as their arrival. */
static int groups_arrive_from_afar(const pw_weight *w, int64_t m) {
    if (!pw_core()->groups_from_afar || !w->group) return 0;
    return m > 2 * STREAM_ROWS || (w->kind == PW_Q8 && m > STREAM_ROWS - 2);
}

/* Threads share out the columns: each reads its own weights and everybody's rows. Where the rows are the larger part,
 * they share out the rows instead, which each then finds where it has prepared them. */
static void share_out(const pw_weight *w, int64_t m, int32_t threads, pw_schedule *s) {
    int by_rows = m >= (int64_t)OWN_ROWS * threads && w->n <= FEW_COLUMNS * m && w->n * w->k <= FEW_WEIGHTS;
    s->threads_m = by_rows ? threads : 1;
    s->threads_n = by_rows ? 1 : threads;
    s->threads_k = 1;
}

pw_schedule pw_default_schedule(const pw_weight *w, int64_t m, int32_t threads) {
    int32_t mr, panels;
    pw_active()->gemm.best_tile(w, m, &mr, &panels);
    int64_t eighths = value_eighths(w, m);
    int64_t fitting_k = (int64_t)L1_WEIGHT_BYTES * 8 / (PW_PANEL * panels * pass_bits(w, m));
    int64_t k = pw_padded_k(w->k), panel_bytes = at_least(1, k * PW_PANEL * eighths / 8);
    pw_schedule s = {0};
    s.mr = mr;
    s.panels = panels;
    s.block_m = m <= STREAM_ROWS ? STREAM_ROWS : BLOCK_ROWS;
    int64_t block_panels = at_least(panels, at_most(1 << 20, L2_WEIGHT_BYTES / panel_bytes));
    s.block_k = (int32_t)(m <= mr ? k : pass_inputs(k, fitting_k));
    if (m > STREAM_ROWS) block_panels = BLOCK_PANELS / panels * panels;
    if (m > STREAM_ROWS && w->kind < PW_Q8) s.block_k = (int32_t)pass_inputs(k, dense_pass_inputs(w));
    if (m > STREAM_ROWS && bytes_arrive_from_l2(w, m)) s.block_k = (int32_t)pass_inputs(k, BYTE_PASS_INPUTS);
    if (m > STREAM_ROWS && in_tiles(w)) {
        int64_t strip_inputs = PW_TILE_L1_BYTES * 8 / (PW_PANEL * panels * eighths);
        s.block_k = (int32_t)pass_inputs(k, eighths > 8 ? strip_inputs : BYTE_PASS_INPUTS);
        block_panels = TILE_BLOCK_PANELS;
    }
    if (in_planes(w, mr)) s.block_k = (int32_t)pass_inputs(k, PLANE_PASS_INPUTS);
    s.block_n = (int32_t)(block_panels * PW_PANEL);
    s.prefetch_bytes = m > STREAM_ROWS && w->kind >= PW_Q8 ? GROUPS_AHEAD_BYTES : STREAM_AHEAD_BYTES;
    if (groups_arrive_from_afar(w, m) || (m > STREAM_ROWS && (in_tiles(w) || in_planes(w, mr)))) s.prefetch_bytes = FAR_GROUPS_BYTES;
    stream_from_afar(w, m, &s);
    if (pw_active()->gemm.reads_blocks(w, m)) {
        s.prefetch_bytes = FAR_BYTES;
        s.block_k = (int32_t)(m > 2 * STREAM_ROWS ? pass_inputs(k, BYTE_PASS_INPUTS) : k);
    }
    if (w->offsets) stream_sparse(w, m, &s);
    share_out(w, m, (int32_t)at_least(1, threads), &s);
    return s;
}

/* Part i of `parts` nearly equal parts of [0, count), cut at multiples of `unit`. */
static pw_range part_of(int64_t count, int64_t unit, int64_t parts, int64_t i) {
    int64_t units = (count + unit - 1) / unit;
    return (pw_range){at_most(count, units * i / parts * unit), at_most(count, units * (i + 1) / parts * unit)};
}

void pw_share(const pw_schedule *s, const pw_weight *w, int64_t m, int32_t thread, pw_range *rows, pw_range *panels) {
    int64_t threads_m = at_least(1, s->threads_m), threads_n = at_least(1, s->threads_n);
    if (thread < 0 || thread >= threads_m * threads_n) {
        *rows = *panels = (pw_range){0, 0};
        return;
    }
    *rows = part_of(m, at_least(1, s->mr), threads_m, thread / threads_n);
    *panels = part_of(pw_panels(w->n), 1, threads_n, thread % threads_n);
}

const char *pw_path_name(int path) {
    static const char *const names[PW_PATHS] = {"fma",      "f16_fma",   "bf16_dot", "bf16_tile",
                                                 "int8_dot", "int8_tile", "int8_block"};
    return path >= 0 && path < PW_PATHS ? names[path] : NULL;
}

pw_range pw_k_part(const pw_weight *w, int32_t part) {
    pw_range units = part_of(pw_padded_k(w->k), PW_K_MULTIPLE, w->k_parts, part);
    return (pw_range){at_most(w->k, units.begin), at_most(w->k, units.end)};
}

int64_t pw_now_ns(void) { return now_ns(); }
