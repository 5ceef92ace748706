/* Which tables this machine can run, by cpuid and by what the operating system saves. */
#include "dispatch.h"

#include <stddef.h>
#include <string.h>

static const char *const LADDER[] = {"portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};
enum { LADDER_RUNGS = sizeof LADDER / sizeof LADDER[0] };

extern const pw_kernels pw_portable_kernels;
static int runs_anywhere(void) { return 1; }

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

extern const pw_kernels pw_avx2_kernels, pw_avx512_kernels, pw_avx512_vnni_kernels, pw_avx512_bf16_kernels,
    pw_amx_kernels;

enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xE6, XCR0_AMX = 0x60000 };
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* asm/prctl.h of newer kernels */

typedef struct {
    unsigned leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax;
    uint64_t xcr0; /* register states that the system saves */
} cpu_features;

static cpu_features read_cpu(void) {
    cpu_features f = {0};
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return f;
    f.leaf1_ecx = ecx;
    if (__get_cpuid_count(7, 0, &eax, &f.leaf7_ebx, &f.leaf7_ecx, &f.leaf7_edx) && eax >= 1) {
        __get_cpuid_count(7, 1, &f.leaf7_1_eax, &ebx, &ecx, &edx);
    }
    if (f.leaf1_ecx & 1u << 27) {
        uint32_t low, high;
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        f.xcr0 = (uint64_t)high << 32 | low;
    }
    return f;
}

static int has(unsigned reg, unsigned bits) { return (reg & bits) == bits; }

static int runs_avx2(void) {
    cpu_features f = read_cpu();
    unsigned fma_f16c = 1u << 12 | 1u << 29, bmi_avx2_bmi2 = 1u << 3 | 1u << 5 | 1u << 8;
    return (f.xcr0 & XCR0_AVX) == XCR0_AVX && has(f.leaf1_ecx, fma_f16c) && has(f.leaf7_ebx, bmi_avx2_bmi2);
}

static int runs_avx512(void) {
    cpu_features f = read_cpu();
    unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    return runs_avx2() && (f.xcr0 & XCR0_AVX512) == XCR0_AVX512 && has(f.leaf7_ebx, f_dq_bw_vl);
}

static int runs_avx512_vnni(void) { return runs_avx512() && has(read_cpu().leaf7_ecx, 1u << 11); }
static int runs_avx512_bf16(void) { return runs_avx512_vnni() && has(read_cpu().leaf7_1_eax, 1u << 5); }

/* Linux saves tile data only for a process that has asked for it, before any thread touches a tile. */
static int may_use_tiles(void) {
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static int runs_amx(void) {
    cpu_features f = read_cpu();
    unsigned bf16_tile_int8 = 1u << 22 | 1u << 24 | 1u << 25;
    return runs_avx512_bf16() && has(f.leaf7_edx, bf16_tile_int8) && (f.xcr0 & XCR0_AMX) == XCR0_AMX && may_use_tiles();
}
#endif

static const struct {
    const pw_kernels *kernels;
    int (*runs_here)(void);
} TABLES[] = {
    {&pw_portable_kernels, runs_anywhere},
#if defined(__x86_64__)
    {&pw_avx2_kernels, runs_avx2},
    {&pw_avx512_kernels, runs_avx512},
    {&pw_avx512_vnni_kernels, runs_avx512_vnni},
    {&pw_avx512_bf16_kernels, runs_avx512_bf16},
    {&pw_amx_kernels, runs_amx},
#endif
};
enum { TABLE_COUNT = sizeof TABLES / sizeof TABLES[0] };

static const pw_kernels *active = &pw_portable_kernels;

/* Asked once: cpuid leaves a virtual machine and takes its time. */
int pw_usable_count(void) {
    static int count;
    if (!count) {
        while (count < TABLE_COUNT && TABLES[count].runs_here()) ++count;
    }
    return count;
}

const pw_kernels *pw_usable(int index) {
    return index >= 0 && index < pw_usable_count() ? TABLES[index].kernels : NULL;
}

const pw_kernels *pw_active(void) { return active; }

const char *pw_isa_name(int index) { return index >= 0 && index < LADDER_RUNGS ? LADDER[index] : NULL; }

const char *pw_select(const char *isa) {
    int count = pw_usable_count();
    for (int i = count - 1; i >= 0; --i) {
        if (!isa || !strcmp(TABLES[i].kernels->isa, isa)) {
            active = TABLES[i].kernels;
            return NULL;
        }
    }
    for (int i = 0; i < LADDER_RUNGS; ++i) {
        if (!strcmp(LADDER[i], isa)) return "this machine cannot run it";
    }
    return "there is no such instruction set";
}
