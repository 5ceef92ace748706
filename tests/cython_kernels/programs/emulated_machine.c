/* A CPU with a tile unit under a system that gives it to who asks: what `ld --wrap` puts before cpu.c's questions.
 * With REFUSE_TILES in the environment the system says no. The rungs between have no kernels here. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>

#include "cpu.h"
#include "dispatch.h"

#ifndef PW_WHOLE_PROGRAMS /* which lay out their rows for every table that there is */
const pw_kernels pw_avx2_kernels = {.isa = "avx2"}, pw_avx_vnni_kernels = {.isa = "avx_vnni"},
                 pw_avx512_kernels = {.isa = "avx512"}, pw_avx512_vnni_kernels = {.isa = "avx512_vnni"},
                 pw_avx512_bf16_kernels = {.isa = "avx512_bf16"};
#endif

int emulated_tiles_granted;

unsigned __wrap_pw_cpu_features(void);
unsigned __wrap_pw_cpu_features(void) {
    return PW_CPU_AVX2 | PW_CPU_AVX512 | PW_CPU_AVX512_VNNI | PW_CPU_AVX512_BF16 | PW_CPU_AMX;
}

/* ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA (Linux, Documentation/arch/x86/xstate.rst) */
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    va_list arguments;
    va_start(arguments, number);
    int request = va_arg(arguments, int), feature = va_arg(arguments, int);
    va_end(arguments);
    if (number == SYS_arch_prctl && request == 0x1023 && feature == 18 && !getenv("REFUSE_TILES")) {
        emulated_tiles_granted = 1;
        return 0;
    }
    errno = EINVAL;
    return -1;
}
