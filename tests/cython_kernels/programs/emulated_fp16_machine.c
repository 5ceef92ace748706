/* A CPU with half-precision multiply-adds, as `ld --wrap` puts it before cpu.c. The rungs below have no kernels here. */
#include "cpu.h"
#include "dispatch.h"

#ifndef PW_WHOLE_PROGRAMS /* which lay out their rows for every table that there is */
const pw_kernels pw_avx2_kernels = {.isa = "avx2"}, pw_avx_vnni_kernels = {.isa = "avx_vnni"},
                 pw_avx512_kernels = {.isa = "avx512"}, pw_avx512_vnni_kernels = {.isa = "avx512_vnni"},
                 pw_avx512_bf16_kernels = {.isa = "avx512_bf16"}, pw_amx_kernels = {.isa = "amx"};
#endif

unsigned __wrap_pw_cpu_features(void);
unsigned __wrap_pw_cpu_features(void) {
    return PW_CPU_AVX2 | PW_CPU_AVX512 | PW_CPU_AVX512_VNNI | PW_CPU_AVX512_BF16 | PW_CPU_AVX512_FP16;
}
