/* What this CPU can do and what the system saves for it, in the words that the ladder of dispatch.c asks in. */
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
} pw_cpu_feature;

/* pw_cpu_feature bits. Slow (cpuid leaves a virtual machine): ask once. */
unsigned pw_cpu_features(void);

/* Linux saves tile data only for a process that has asked for it, before any thread touches a tile. Asks; 1 when
 * it is granted. */
int pw_cpu_request_tiles(void);

#endif
