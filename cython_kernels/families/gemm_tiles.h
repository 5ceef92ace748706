/* What the units of the GEMM family share: prepared rows, a micro-kernel's call, and whose tables of them there are. */
#ifndef PHASEWISE_FAMILIES_GEMM_TILES_H
#define PHASEWISE_FAMILIES_GEMM_TILES_H

#include "cpu.h"
#include "families/slots.h"

/* A vector row is the 64 bytes of a panel that hold 16 columns of 1 (f32), 2 (bf16, f16), 4 (q8) or 8 (q4) inputs. */
enum { MAX_MR = PW_MOST_TILE, MAX_TILE_PANELS = 8, VECTORS = PW_PANEL / LANES, VECTOR_ROW_BYTES = 64 };

/* Vectors of sums that a dense tile has in registers beside what a step reads: AVX2 has sixteen. Where a tile has more, it
 * takes panel after panel (gemm_dense.h). */
enum { DENSE_HELD = LANES == 8 ? 12 : 30 };

PW_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
PW_INLINE int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }
PW_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

/* The first of the fewest parts of at most `most`, all nearly equal: a short last tile would be slower by the row. */
PW_INLINE int64_t fair_part(int64_t count, int64_t most) {
    return count <= most ? count : pieces(count, pieces(count, most));
}

#ifndef PW_FMA_ROUNDS_ONCE
#define PW_FMA_ROUNDS_ONCE 0
#endif
#ifndef PW_FMA_IN_PLACE
PW_INLINE vf v_fma_in_place(vf a, vf b, vf acc) { return v_fma(a, b, acc); }
#endif
#ifndef PW_DOT_OPERANDS
#define PW_DOT_OPERANDS 0
PW_INLINE vi dot_at(vi acc, vi w, const uint8_t *x) {
    (void)w, (void)x;
    return acc;
}
#endif
#define PW_HIDE(x) __asm__("" : "+r"(x))
#define FLOAT_BIAS 12582912.0f /* integers around its bits, read as floats, are the integers around it */
enum { FLOAT_BIAS_BITS = 0x4B400000 };

/* A group of quantised activations: the values in the order of the ISA's dots, then
 * float scale; int32 FLOAT_BIAS_BITS + (Q8_WEIGHT_OFFSET - zero_point) * sum(q), q4 without the offset;
 * float scale * sum(q). */
PW_INLINE int64_t group_values_bytes(int kind, int group) {
    return kind == PW_Q8 ? group * Q8_ACTIVATION_BYTES : group;
}
PW_INLINE int64_t group_block_bytes(int kind, int group) {
    return kind == PW_F32 ? 4 * group : group_values_bytes(kind, group) + 12;
}

/* A row of path int8_block, for each 256 inputs: bytes in the order of k; their sums, int16, of 16 and of 32 inputs;
 * float scale. */
enum {
    BLOCKWISE_SUMS_AT = PW_BLOCK_INPUTS,
    BLOCKWISE_SUMS_32_AT = BLOCKWISE_SUMS_AT + 2 * PW_BLOCK_INPUTS / 16,
    BLOCKWISE_SCALE_AT = BLOCKWISE_SUMS_32_AT + 2 * PW_BLOCK_INPUTS / 32,
    BLOCKWISE_ROW_BYTES = BLOCKWISE_SCALE_AT + 4,
};

/* A quantised row with one scale: its values, then its fields:
 * float scale; int32 (Q8_WEIGHT_OFFSET - zero_point) * sum(q of the first 32 i) for i = 0.. padded k / 32. */
enum { COLUMN_SCALE_BYTES = 4 };
PW_INLINE int64_t column_values_bytes(int64_t k) { return pw_padded_k(k) * Q8_ACTIVATION_BYTES; }

/* The f16_fma path (gemm_f16.c): a row of float16 has an int32 exponent and a float factor behind its values. Float16
 * weights stay below 2^7, rows at most 2^2: a fold of 64 products at most 2^15. */
enum { F16_FOLD_STEPS = 32, F16_FIELD_BYTES = 8, F16_TOP_FIELD = 7 - 1 + 15, F16_ROW_EXPONENT = 1 };
PW_INLINE int32_t f16_fields_less(int32_t top_exponent) {
    return top_exponent > F16_TOP_FIELD ? top_exponent - F16_TOP_FIELD : 0;
}

/* A pass that is not the last of its part ends with a fold. */
PW_INLINE int64_t whole_folds(int64_t steps) {
    return steps < F16_FOLD_STEPS ? F16_FOLD_STEPS : steps / F16_FOLD_STEPS * F16_FOLD_STEPS;
}

/* Lines that a dense kernel asks for, one a step: of each panel from `values` on, and of two rows this many bytes from
 * the first one's reading. */
typedef struct {
    const uint8_t *values;
    int64_t values_step, panel_bytes, rows_ahead;
    int far; /* ask_for */
} lookahead;

/* Asks for a line of weights. From afar only as far as L2: what a core can wait for at once is little beside what L2
 * can, and L1 would have let go of the line before it is read. */
PW_INLINE int is_far(int64_t bytes_ahead) { return bytes_ahead >= 8192; }
PW_INLINE void ask_for(const uint8_t *line, int far) {
    if (far) __builtin_prefetch(line, 0, 2);
    else __builtin_prefetch(line);
}

/* One micro-kernel call: mr rows times some panels over `steps` steps of k. A step is one input (f32, f16), a pair (bf16)
 * or a group (q8, q4). Pointers are at the first step of the first row or panel.
 * out = partial + this range, plus out's old value if `add`. */
typedef struct {
    int32_t mr, panels;
    const uint8_t *rows;
    int64_t row_bytes;
    const uint8_t *values;
    int64_t panel_bytes;
    const uint8_t *scales, *mins; /* mins may be NULL */
    const uint8_t *offsets;       /* float32 -FLOAT_BIAS * scale, exact, like scales; or NULL */
    int64_t panel_scale_bytes;
    int32_t scale_bytes;
    int32_t add;
    int32_t ends_part;          /* group 0: sums are int32 before the last pass of a part; f16_fma: scaled */
    int32_t top_exponent;       /* f16_fma */
    const uint8_t *row_scales;  /* group 0, f16_fma: of the first row */
    const uint8_t *row_biases;  /* group 0: of the first row, at the first step */
    int64_t steps;
    const pw_weight *sparse;    /* a tile that expands (gemm_sparse.c): whose panels it reads, */
    int64_t first_panel, first_row; /* from this panel, and this vector row of each panel, on */
    int64_t prefetch_bytes; /* ahead of each read of values; 0: they are in L1 */
    int64_t prefetch_jump;  /* more than that in the last prefetch_bytes of a panel, where the next panels follow */
    const float *partial;   /* [mr][partial_stride], NULL: nothing yet */
    int64_t partial_stride;
    float *out; /* [mr][out_stride] */
    int64_t out_stride;
    lookahead next; /* in place of prefetch_bytes when that is 0 */
} tile_call;

typedef void tile_kernel(const tile_call *t);

/* [rows][panels]: NULL where there is no such micro-kernel. */
typedef tile_kernel *tile_table[MAX_MR + 1][MAX_TILE_PANELS + 1];

/* The micro-kernels NAME_<mr>x<panels> of a list, and their table NAME_tiles: each is tile(t, ..., mr, panels). */
#define PW_TILE(mr, np, name, tile, ...) \
    static void name##_##mr##x##np(const tile_call *t) { tile(t, ##__VA_ARGS__, mr, np); }
#define PW_TILE_ENTRY(mr, np, name) [mr][np] = name##_##mr##x##np,
#define PW_TILES(name, LIST, ...)       \
    LIST(PW_TILE, name, __VA_ARGS__)    \
    const tile_table ISA(name##_tiles) = {LIST(PW_TILE_ENTRY, name)};

/* The ways that a product is computed: a table of micro-kernels each, or what quantised weights are unpacked to first.
 * Blocks that are not unpacked have a table for each kind. */
typedef enum {
    F32, BF16_FMA, F16_WIDENED, F16_FMA, BF16_AS_F16, BF16_DOT, BF16_TILE, Q8_GROUP32, Q8_GROUP16, Q8_COLUMN,
    Q8_COLUMN_TILE, Q4, IN_BLOCKS, BLOCKWISE, STAGED_BLOCKWISE, BLOCKWISE_TILE, ARITHMETICS,
    QUANT_AS_F32 = ARITHMETICS, QUANT_AS_BF16_DOT, QUANT_AS_BF16_TILE
} arithmetic;

extern const tile_table ISA(f32_tiles), ISA(bf16_fma_tiles), ISA(bf16_dot_tiles);        /* gemm_f32.c, gemm_bf16.c */
extern const tile_table ISA(f16_widened_tiles);                                          /* gemm_f32.c */
extern const tile_table ISA(f16_tiles), ISA(bf16_as_f16_tiles);                          /* gemm_f16.c */
extern const tile_table ISA(bf16_amx_tiles), ISA(q8c_amx_tiles);                         /* gemm_amx.c */
extern const tile_table ISA(sparse_bf16_amx_tiles), ISA(sparse_q8c_amx_tiles);
extern const tile_table ISA(q8_tiles), ISA(q8g16_tiles), ISA(q4_tiles), ISA(q8c_tiles);  /* gemm_quant.c */
extern const tile_table ISA(sparse_bf16_fma_tiles), ISA(sparse_bf16_dot_tiles);          /* gemm_sparse.c */
extern const tile_table ISA(sparse_q8_tiles), ISA(sparse_q8g16_tiles), ISA(sparse_q8c_tiles);
extern const tile_table ISA(block_tiles)[PW_KINDS];                                      /* gemm_blocks.c */
extern const tile_table ISA(blockwise_tiles)[PW_KINDS], ISA(staged_blockwise_tiles)[PW_KINDS]; /* gemm_blockwise.c */
extern const tile_table ISA(blockwise_amx_tiles)[PW_KINDS];

/* gemm_stage.c: puts what a call reads into `bytes`, as the kernels of an arithmetic that is staged read it. */
void ISA(stage)(arithmetic a, tile_call *t, const pw_weight *w, uint8_t *bytes);
void ISA(stage_blockwise)(tile_call *t, const pw_weight *w, uint8_t *bytes, int in_planes); /* gemm_blockwise.c */

enum { STAGED_BYTES = 64 << 10 };

/* Nibbles become bytes where q4 rows look like q8 rows, but not on cores that unpack beside their dots: those do better
 * with half the bytes to read. */
PW_INLINE int stages_nibbles(void) {
    return Q8_ACTIVATION_BYTES == 1 && !(PW_DOT_OPERANDS && pw_core()->unpacks_beside_dots);
}

/* Most rows of a tile of blocks that apply sub-scales in integers (gemm_blockwise.c). */
enum { BLOCKWISE_MR = LANES == 16 ? 8 : 4, STAGED_CODES_BYTES = PW_BLOCK_INPUTS * PW_PANEL };
PW_INLINE int64_t staged_block_bytes(pw_block_format f) {
    int64_t groups = f.inputs / f.group;
    return STAGED_CODES_BYTES + (groups + groups / 2 + 2) * VECTOR_ROW_BYTES;
}

/* For the tile unit codes times sub-scales are staged, as planes of bytes. A byte holds what halves of a byte make. */
PW_INLINE int planes_of(pw_block_format f) { return f.scaling == PW_SUPER_HALVES ? 1 : 2; }
PW_INLINE int64_t planes_bytes(pw_block_format f) {
    return planes_of(f) * STAGED_CODES_BYTES + (f.inputs / f.group / 2 + 2) * VECTOR_ROW_BYTES;
}

PW_INLINE int is_grouped(arithmetic a) {
    return a == Q8_GROUP32 || a == Q8_GROUP16 || a == Q4 || (a >= IN_BLOCKS && a < ARITHMETICS);
}

/* Inputs and bytes of a prepared row that one step of a pass takes. */
PW_INLINE int64_t inputs_of_step(arithmetic a, const pw_weight *w) {
    if (pw_in_blocks(w->kind)) return pw_block_format_of(w->kind).inputs;
    if (a == F32 || a == F16_WIDENED) return 1;
    if (a == BF16_FMA || a == BF16_AS_F16 || a == BF16_DOT) return 2;
    return a == Q8_GROUP16 ? w->group : PW_K_MULTIPLE;
}

PW_INLINE int64_t row_bytes_of_step(arithmetic a, const pw_weight *w) {
    if (a == BLOCKWISE || a == BLOCKWISE_TILE) return BLOCKWISE_ROW_BYTES;
    if (a == IN_BLOCKS) return inputs_of_step(a, w) / w->group * group_block_bytes(pw_arithmetic_kind(w->kind), w->group);
    if (is_grouped(a)) return group_block_bytes(w->kind, w->group);
    if (a == Q8_COLUMN || a == Q8_COLUMN_TILE) return PW_K_MULTIPLE * Q8_ACTIVATION_BYTES;
    return inputs_of_step(a, w) * (a == F32 || a == BF16_FMA || a == F16_WIDENED || a == QUANT_AS_F32 ? 4 : 2);
}

/* Where the fields of a prepared row with one scale begin. */
PW_INLINE int64_t row_values_bytes(arithmetic a, int64_t k) {
    return a == BF16_AS_F16 ? 2 * pw_padded_k(k) : column_values_bytes(k);
}

/* Bytes that a step of one panel takes staged. */
PW_INLINE int64_t staged_step_bytes(arithmetic a, const pw_weight *w) {
    int64_t inputs = pw_in_blocks(w->kind) ? inputs_of_step(a, w) : PW_K_MULTIPLE;
    if (a == QUANT_AS_F32 || w->kind == PW_FP8) return inputs * VECTOR_ROW_BYTES;
    if (a >= ARITHMETICS) return inputs * VECTOR_ROW_BYTES / 2;
    if (a == BLOCKWISE) return staged_block_bytes(pw_block_format_of(w->kind));
    if (a == BLOCKWISE_TILE) return planes_bytes(pw_block_format_of(w->kind));
    if (a == IN_BLOCKS) return inputs / w->group * 3 * VECTOR_ROW_BYTES + inputs * PW_PANEL;
    if (a == BF16_FMA) return 2 * VECTOR_ROW_BYTES;
    if (a == BF16_AS_F16 || a == F16_WIDENED) return VECTOR_ROW_BYTES;
    return 3 * VECTOR_ROW_BYTES + (a == Q4 && stages_nibbles() ? PW_K_MULTIPLE * PW_PANEL : 0);
}

/* Fewer rows than TALL_MR stream weights. More come in several tiles, and their inputs are worth asking for, a few
 * steps at a time: a core that its other hyper-thread is using as well has hardly more instructions to spare than the
 * multiply-adds are. */
enum { TALL_MR = 5, TALL_STEPS = 4 };

/* Whose reading is the last to ask for a line of the same panels, which end there; the next ask for others. */
PW_INLINE const uint8_t *last_read(const tile_call *t, const uint8_t *end) {
    return end - t->values < t->prefetch_bytes ? t->values : end - t->prefetch_bytes;
}

PW_INLINE float float_at(const uint8_t *p) {
    float x;
    memcpy(&x, p, sizeof x);
    return x;
}

PW_INLINE int32_t int_at(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The sums of a tile, [mr][vectors]: indices are constants after unrolling, so these live in registers. */
typedef vf tile_sums[MAX_MR * MAX_TILE_PANELS * VECTORS];

PW_INLINE void begin_sums(const tile_call *t, vf *acc, int mr, int vectors) {
    PW_UNROLL for (int i = 0; i < mr * vectors; ++i) {
        int64_t at = (i / vectors) * t->partial_stride + (i % vectors) * LANES;
        acc[i] = t->partial ? v_load(t->partial + at) : v_zero();
    }
}

PW_INLINE void end_sums(const tile_call *t, const vf *acc, int mr, int vectors) {
    PW_UNROLL for (int i = 0; i < mr * vectors; ++i) {
        float *out = t->out + (i / vectors) * t->out_stride + (i % vectors) * LANES;
        v_store(out, t->add ? v_add(v_load(out), acc[i]) : acc[i]);
    }
}

#endif
