/* A CPU with dots of bf16, as `ld --wrap` puts it before cpu.c. */
#include "cpu.h"

unsigned __wrap_pw_cpu_features(void);
unsigned __wrap_pw_cpu_features(void) {
    return PW_CPU_AVX2 | PW_CPU_AVX512 | PW_CPU_AVX512_VNNI | PW_CPU_AVX512_BF16;
}
