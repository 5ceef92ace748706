/* What this CPU can do, what the system saves for it, and what is known of how its cores behave. */
#ifndef PHASEWISE_CPU_H
#define PHASEWISE_CPU_H

typedef enum {
    PW_CPU_AVX2 = 1 << 0, /* with FMA, F16C and BMI */
    PW_CPU_AVX_VNNI = 1 << 1,
    PW_CPU_AVX512 = 1 << 2, /* F, BW, DQ and VL */
    PW_CPU_AVX512_VNNI = 1 << 3,
    PW_CPU_AVX512_BF16 = 1 << 4,
    PW_CPU_AVX512_FP16 = 1 << 10,
    PW_CPU_AMX = 1 << 5, /* int8 and bf16 tiles */
    PW_CPU_NEON = 1 << 6,
    PW_CPU_NEON_DOTPROD = 1 << 7,
    PW_CPU_NEON_BF16 = 1 << 8,
    PW_CPU_NEON_I8MM = 1 << 9,
    PW_CPU_AVX512_VBMI2 = 1 << 11,
} pw_cpu_feature;

/* pw_cpu_feature bits. Slow (cpuid leaves a virtual machine): ask once. */
unsigned pw_cpu_features(void);

/* 1 where an instruction of 128 bits multiplies and adds by one rounding, on x86-64; known once features have been asked for.
 * Portable C uses it, and finds the same bits without. */
extern int pw_cpu_fuses;

/* 1 where one instruction expands a vector row of a sparse weight: AVX-512 with VBMI2. Cascade Lake and Cooper Lake have
 * AVX-512 without it. Asked once. */
int pw_cpu_expands(void);

/* For tests: 0, as if the cores could not; 1, what they can. */
void pw_cpu_let_expand(int allowed);

/* Linux saves tile data only for a process that has asked for it, before any thread touches a tile. Asks; 1 when
 * it is granted. */
int pw_cpu_request_tiles(void);

/* How a kind of core behaves, as far as default choices depend on it. Every machine can run every choice, and no trait
 * changes a bit of any result (decision 0031). Figures: benchmarks/notes/kernels.md. */
typedef struct {
    const char *name;

    /* A single row's weights arrive fastest when no line is asked for ahead; with a few more rows, lines are best asked
     * for into L2, and quantised panels read one after the other. */
    int streams_unaided;

    /* Quantised weights for many rows, and bytes for a few, are asked for from twice as far. */
    int groups_from_afar;

    /* An int8 dot takes twice as long as on the core that L1_WEIGHT_BYTES was measured on: weights may come from L2. */
    int slow_dots;

    /* Nibbles unpack on ports that do no dots, so that unpacking them once for several tiles of rows gains nothing. */
    int unpacks_beside_dots;

    /* For many rows of bytes, tiles with more panels and fewer rows are faster. */
    int flat_tiles;

    /* A timed product reads float32 rows where they are: copying them costs more than the copy's layout gains. */
    int rows_in_place;

    /* The shape that reads memory fastest: equal parts of the buffer side by side, each asked for so far ahead. */
    int read_streams, read_ahead_bytes;
} pw_core_traits;

/* Of the cores in use: this machine's, or what pw_core_select chose. */
const pw_core_traits *pw_core(void);

/* 1 when the traits of the core called `name` are now in use (NULL: of this machine's); 0 when there is no such core. */
int pw_core_select(const char *name);

/* Every name that pw_core_select knows; NULL past the end. */
const char *pw_core_name(int index);

#endif
