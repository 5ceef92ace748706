/* Which tables this machine can run: the ladder, and what each rung asks of the CPU (cpu.h). */
#include "dispatch.h"

#include "cpu.h"

#include <stddef.h>
#include <string.h>

/* Weak: a build has the tables that setup.py compiles, and dispatch alone has none. */
extern __attribute__((weak)) const pw_kernels pw_portable_kernels, pw_avx2_kernels, pw_avx_vnni_kernels,
    pw_avx512_kernels, pw_avx512_vnni_kernels, pw_avx512_bf16_kernels, pw_avx512_fp16_kernels, pw_amx_kernels,
    pw_neon_kernels, pw_neon_dotprod_kernels, pw_neon_bf16_i8mm_kernels;

#if defined(__x86_64__)
enum { IS_X86 = 1, IS_ARM = 0 };
#elif defined(__aarch64__)
enum { IS_X86 = 0, IS_ARM = 1 };
#else
enum { IS_X86 = 0, IS_ARM = 0 };
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
    int can_run;    /* 0: of another architecture */
} LADDER[] = {
    {"portable", &pw_portable_kernels, 0, 1},
    {"avx2", &pw_avx2_kernels, PW_CPU_AVX2, IS_X86},
    {"avx_vnni", &pw_avx_vnni_kernels, PW_CPU_AVX2 | PW_CPU_AVX_VNNI, IS_X86},
    {"avx512", &pw_avx512_kernels, PW_CPU_AVX2 | PW_CPU_AVX512, IS_X86},
    {"avx512_vnni", &pw_avx512_vnni_kernels, AVX512_DOTS, IS_X86},
    {"avx512_bf16", &pw_avx512_bf16_kernels, AVX512_DOTS | PW_CPU_AVX512_BF16, IS_X86},
    {"avx512_fp16", &pw_avx512_fp16_kernels, AVX512_DOTS | PW_CPU_AVX512_BF16 | PW_CPU_AVX512_FP16, IS_X86},
    {"amx", &pw_amx_kernels, AVX512_DOTS | PW_CPU_AVX512_BF16 | PW_CPU_AMX, IS_X86},
    {"neon", &pw_neon_kernels, PW_CPU_NEON, IS_ARM},
    {"neon_dotprod", &pw_neon_dotprod_kernels, NEON_DOTS, IS_ARM},
    {"neon_bf16_i8mm", &pw_neon_bf16_i8mm_kernels, NEON_DOTS | PW_CPU_NEON_BF16 | PW_CPU_NEON_I8MM, IS_ARM},
};
enum { RUNGS = sizeof LADDER / sizeof LADDER[0] };

static const pw_kernels *active = &pw_portable_kernels;
static const pw_kernels *usable[RUNGS];
static int usable_count;

/* Tiles are asked for last: a process that uses a lower rung never asks for them. */
int pw_isa_runs_here(int index) {
    unsigned needs = LADDER[index].needs;
    return LADDER[index].can_run && (needs & pw_cpu_features()) == needs &&
           (!(needs & PW_CPU_AMX) || pw_cpu_request_tiles());
}

int pw_usable_count(void) {
    if (usable_count) return usable_count;
    for (int i = 0; i < RUNGS; ++i) {
        if (LADDER[i].kernels && pw_isa_runs_here(i)) usable[usable_count++] = LADDER[i].kernels;
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
        if (strcmp(LADDER[i].isa, isa)) continue;
        return pw_isa_runs_here(i) ? "this build lacks it (make build ISA=all)" : "this machine cannot run it";
    }
    return "there is no such instruction set";
}
