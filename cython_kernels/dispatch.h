/* One table of kernels per instruction set, chosen once at import (isa.py, PHASEWISE_ISA). */
#ifndef PHASEWISE_DISPATCH_H
#define PHASEWISE_DISPATCH_H

#include "gemm.h"
#include "ops.h"

#include <stddef.h>

typedef struct {
    /* Bytes of one prepared row of k inputs. */
    int64_t (*row_bytes)(const pw_form *form, int64_t k);

    /* x[rows.begin..end)[k] at stride ldx floats into `prepared`, row i at prepared + i * row_bytes(form, k).
     * For f32 this copies: x itself, with row_bytes = 4 * ldx, serves as well. */
    void (*prepare_rows)(const pw_form *form, int64_t k, const float *x, int64_t ldx, pw_range rows, void *prepared);

    /* y[row][column] for rows x panels (columns 16 * panel .. below n); y is indexed by absolute row and column.
     * `part` -1: the whole product; 0..k_parts-1: that part's sum alone (zero where the part is empty). Part sums,
     * added in order to the first, are the whole product bit for bit. */
    void (*gemm)(const pw_weight *w, const pw_activations *x, pw_range rows, pw_range panels, int32_t part, float *y,
                 int64_t ldy, pw_epilogue epilogue, const pw_schedule *schedule);

    /* The path that this table computes a weight of this kind and group by when asked for `path`: itself, or the default. */
    int32_t (*path_of)(int32_t kind, int32_t group, int32_t path);

    /* The micro-kernel, rows x panels, that suits m rows. */
    void (*best_tile)(const pw_weight *w, int64_t m, int32_t *mr, int32_t *panels);

    /* Whether there is a micro-kernel of mr rows x panels for this weight. Any numbers may be asked about. */
    int32_t (*has_tile)(const pw_weight *w, int32_t mr, int32_t panels);

    /* Whether m rows meet the blocks of this weight as they are: tiles of one panel, one panel after the other. */
    int32_t (*reads_blocks)(const pw_weight *w, int64_t m);

    /* W[row][0..k) as float32, for embedding lookups from packed weights. */
    void (*unpack_row)(const pw_weight *w, int64_t row, float *out);
} pw_gemm_kernels;

typedef struct {
    /* Multiply-adds as fast as one core can; returns the operations done (a multiply and an add are two). */
    uint64_t (*f32)(uint64_t rounds);
    uint64_t (*f16)(uint64_t rounds);
    uint64_t (*bf16)(uint64_t rounds);
    uint64_t (*int8)(uint64_t rounds);

    /* Reads a buffer once, in whole blocks of 512 bytes; returns the bytes read. */
    uint64_t (*read)(const void *buffer, size_t bytes);
} pw_limit_kernels;

typedef struct {
    const char *isa;
    const char *gemm_abi, *attention_abi; /* under which names timings of these kernels are kept: abi.py */
    pw_gemm_kernels gemm;
    pw_limit_kernels limits;
    pw_op_kernels ops;
} pw_kernels;

/* The tables of this build that run on this machine, lowest first. */
int pw_usable_count(void);
const pw_kernels *pw_usable(int index);

/* The table in use. Rows prepared by one table are read by that table only, so switch between steps. */
const pw_kernels *pw_active(void);

/* NULL when `isa` is now in use; otherwise what is wrong with the name. NULL as a name chooses the highest. */
const char *pw_select(const char *isa);

/* Every name in ladder order, usable here or not; NULL past the end. */
const char *pw_isa_name(int index);

/* Whether the CPU and the system have what a name of the ladder needs, built or not. */
int pw_isa_runs_here(int index);

#endif
