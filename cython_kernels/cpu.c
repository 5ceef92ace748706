/* Features: cpuid and XCR0 on x86-64, the auxiliary vector on 64-bit Arm, none on anything else. Traits of cores: a
 * table. */
#include "cpu.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

int pw_cpu_fuses;

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xE6, XCR0_AMX = 0x60000 };
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* asm/prctl.h of newer kernels */

typedef struct {
    unsigned leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax;
    uint64_t xcr0; /* register states that the system saves */
} cpu_registers;

static cpu_registers read_registers(void) {
    cpu_registers r = {0};
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return r;
    r.leaf1_ecx = ecx;
    if (__get_cpuid_count(7, 0, &eax, &r.leaf7_ebx, &r.leaf7_ecx, &r.leaf7_edx) && eax >= 1) {
        __get_cpuid_count(7, 1, &r.leaf7_1_eax, &ebx, &ecx, &edx);
    }
    if (r.leaf1_ecx & 1u << 27) {
        uint32_t low, high;
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        r.xcr0 = (uint64_t)high << 32 | low;
    }
    return r;
}

static unsigned when(unsigned reg, unsigned bits, unsigned feature) { return (reg & bits) == bits ? feature : 0; }

unsigned pw_cpu_features(void) {
    cpu_registers r = read_registers();
    unsigned fma_f16c = 1u << 12 | 1u << 29, bmi_avx2_bmi2 = 1u << 3 | 1u << 5 | 1u << 8;
    unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, bf16_tile_int8 = 1u << 22 | 1u << 24 | 1u << 25;
    unsigned features = 0;
    if ((r.xcr0 & XCR0_AVX) == XCR0_AVX && when(r.leaf1_ecx, fma_f16c, 1)) {
        features |= when(r.leaf7_ebx, bmi_avx2_bmi2, PW_CPU_AVX2) | when(r.leaf7_1_eax, 1u << 4, PW_CPU_AVX_VNNI);
    }
    if ((r.xcr0 & XCR0_AVX512) == XCR0_AVX512) {
        features |= when(r.leaf7_ebx, f_dq_bw_vl, PW_CPU_AVX512) | when(r.leaf7_ecx, 1u << 11, PW_CPU_AVX512_VNNI) |
                    when(r.leaf7_1_eax, 1u << 5, PW_CPU_AVX512_BF16) | when(r.leaf7_ecx, 1u << 6, PW_CPU_AVX512_VBMI2) |
                    when(r.leaf7_edx, 1u << 23, PW_CPU_AVX512_FP16);
    }
    if ((r.xcr0 & XCR0_AMX) == XCR0_AMX) features |= when(r.leaf7_edx, bf16_tile_int8, PW_CPU_AMX);
    pw_cpu_fuses = (features & PW_CPU_AVX2) != 0;
    return features;
}

int pw_cpu_request_tiles(void) {
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

/* asm/hwcap.h of newer kernels */
enum { HWCAP_HAS_ASIMD = 1 << 1, HWCAP_HAS_ASIMDDP = 1 << 20, HWCAP2_HAS_I8MM = 1 << 13, HWCAP2_HAS_BF16 = 1 << 14 };

unsigned pw_cpu_features(void) {
    unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    unsigned features = 0;
    if (first & HWCAP_HAS_ASIMD) features |= PW_CPU_NEON;
    if (first & HWCAP_HAS_ASIMDDP) features |= PW_CPU_NEON_DOTPROD;
    if (second & HWCAP2_HAS_I8MM) features |= PW_CPU_NEON_I8MM;
    if (second & HWCAP2_HAS_BF16) features |= PW_CPU_NEON_BF16;
    return features;
}

int pw_cpu_request_tiles(void) { return 0; }

#else
unsigned pw_cpu_features(void) { return 0; }
int pw_cpu_request_tiles(void) { return 0; }
#endif

enum { NOT_ASKED = -1 };
static _Atomic int expands = NOT_ASKED;

int pw_cpu_expands(void) {
    int known = atomic_load_explicit(&expands, memory_order_relaxed);
    if (known != NOT_ASKED) return known;
    pw_cpu_let_expand(1); /* threads that come here at the same time all find the same */
    return atomic_load_explicit(&expands, memory_order_relaxed);
}

void pw_cpu_let_expand(int allowed) {
    int can = (pw_cpu_features() & PW_CPU_AVX512_VBMI2) != 0;
    atomic_store_explicit(&expands, allowed && can, memory_order_relaxed);
}

/* The only place where a kind of core is told from another. The first is for cores that nothing is known of. */
static const pw_core_traits CORES[] = {
    {.name = "generic", .read_streams = 2, .read_ahead_bytes = 1024},
    /* From Skylake to Granite Rapids; the yardstick was the fastest of one to four streams, 0 to 16 KiB ahead. */
    {.name = "intel", .groups_from_afar = 1, .read_streams = 2, .read_ahead_bytes = 1024},
    /* Without AVX-512. A core of AMD's reads up to a quarter slower where lines are asked for, 0 to 8 KiB ahead. */
    {.name = "zen", .streams_unaided = 1, .unpacks_beside_dots = 1, .flat_tiles = 1, .rows_in_place = 1, .read_streams = 1},
    {.name = "zen4", .streams_unaided = 1, .slow_dots = 1, .unpacks_beside_dots = 1, .flat_tiles = 1, .rows_in_place = 1,
     .read_streams = 1},
};
enum { N_CORES = sizeof CORES / sizeof CORES[0] };

static const char *detected_core(void) {
#if defined(__x86_64__)
    if (!__builtin_cpu_is("amd")) return "intel";
    return __builtin_cpu_supports("avx512vnni") ? "zen4" : "zen";
#else
    return "generic";
#endif
}

static _Atomic(const pw_core_traits *) core_in_use;

const pw_core_traits *pw_core(void) {
    const pw_core_traits *core = atomic_load_explicit(&core_in_use, memory_order_relaxed);
    if (core) return core;
    pw_core_select(NULL); /* threads that come here at the same time all find the same */
    return atomic_load_explicit(&core_in_use, memory_order_relaxed);
}

int pw_core_select(const char *name) {
    if (!name) name = detected_core();
    for (int i = 0; i < N_CORES; ++i) {
        if (strcmp(CORES[i].name, name)) continue;
        atomic_store_explicit(&core_in_use, &CORES[i], memory_order_relaxed);
        return 1;
    }
    return 0;
}

const char *pw_core_name(int index) { return index >= 0 && index < N_CORES ? CORES[index].name : NULL; }
