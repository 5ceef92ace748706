/* Which tables this machine can run: the ladder, and what each rung asks of the CPU (cpu.h). */
#include "dispatch.h"

#include "cpu.h"

#include <stddef.h>
#include <string.h>

extern const pw_kernels pw_portable_kernels, pw_avx2_kernels, pw_avx_vnni_kernels, pw_avx512_kernels,
    pw_avx512_vnni_kernels, pw_avx512_bf16_kernels, pw_amx_kernels, pw_neon_kernels, pw_neon_dotprod_kernels,
    pw_neon_bf16_i8mm_kernels;
extern __attribute__((weak)) const pw_kernels pw_avx512_fp16_kernels; /* setup.py: not every compiler knows it */

/* Tables of another architecture are named, and not built. */
#if defined(__x86_64__)
#define X86(table) &table
#define ARM(table) NULL
#elif defined(__aarch64__)
#define X86(table) NULL
#define ARM(table) &table
#else
#define X86(table) NULL
#define ARM(table) NULL
#endif

enum {
    AVX512_DOTS = PW_CPU_AVX2 | PW_CPU_AVX512 | PW_CPU_AVX512_VNNI,
    NEON_DOTS = PW_CPU_NEON | PW_CPU_NEON_DOTPROD,
};

/* By speed within an architecture: the last that runs is chosen. */
static const struct {
    const char *isa;
    const pw_kernels *kernels;
    unsigned needs; /* pw_cpu_feature bits */
} LADDER[] = {
    {"portable", &pw_portable_kernels, 0},
    {"avx2", X86(pw_avx2_kernels), PW_CPU_AVX2},
    {"avx_vnni", X86(pw_avx_vnni_kernels), PW_CPU_AVX2 | PW_CPU_AVX_VNNI},
    {"avx512", X86(pw_avx512_kernels), PW_CPU_AVX2 | PW_CPU_AVX512},
    {"avx512_vnni", X86(pw_avx512_vnni_kernels), AVX512_DOTS},
    {"avx512_bf16", X86(pw_avx512_bf16_kernels), AVX512_DOTS | PW_CPU_AVX512_BF16},
    {"avx512_fp16", X86(pw_avx512_fp16_kernels), AVX512_DOTS | PW_CPU_AVX512_BF16 | PW_CPU_AVX512_FP16},
    {"amx", X86(pw_amx_kernels), AVX512_DOTS | PW_CPU_AVX512_BF16 | PW_CPU_AMX},
    {"neon", ARM(pw_neon_kernels), PW_CPU_NEON},
    {"neon_dotprod", ARM(pw_neon_dotprod_kernels), NEON_DOTS},
    {"neon_bf16_i8mm", ARM(pw_neon_bf16_i8mm_kernels), NEON_DOTS | PW_CPU_NEON_BF16 | PW_CPU_NEON_I8MM},
};
enum { RUNGS = sizeof LADDER / sizeof LADDER[0] };

static const pw_kernels *active = &pw_portable_kernels;
static const pw_kernels *usable[RUNGS];
static int usable_count;

/* Tiles are asked for last: a process that uses a lower rung never asks for them. */
static int runs_here(unsigned needs, unsigned features) {
    return (needs & features) == needs && (!(needs & PW_CPU_AMX) || pw_cpu_request_tiles());
}

int pw_usable_count(void) {
    if (usable_count) return usable_count;
    unsigned features = pw_cpu_features();
    for (int i = 0; i < RUNGS; ++i) {
        if (LADDER[i].kernels && runs_here(LADDER[i].needs, features)) usable[usable_count++] = LADDER[i].kernels;
    }
    return usable_count;
}

const pw_kernels *pw_usable(int index) { return index >= 0 && index < pw_usable_count() ? usable[index] : NULL; }

const pw_kernels *pw_active(void) { return active; }

const char *pw_isa_name(int index) { return index >= 0 && index < RUNGS ? LADDER[index].isa : NULL; }

const char *pw_select(const char *isa) {
    for (int i = pw_usable_count() - 1; i >= 0; --i) {
        if (!isa || !strcmp(usable[i]->isa, isa)) {
            active = usable[i];
            return NULL;
        }
    }
    for (int i = 0; i < RUNGS; ++i) {
        if (!strcmp(LADDER[i].isa, isa)) return "this machine cannot run it";
    }
    return "there is no such instruction set";
}
