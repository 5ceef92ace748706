/* The same by the kernels that the engine runs: families/rows/rmsnorm.c, then the loops of families/quantise.c for groups of
 * 32, without the fields that only products read. Built with -I cython_kernels and the flags of the vocabulary. */
#if defined(__AVX512F__)
#define PW_ISA avx512
#include "simd/avx512.h"
#else
#define PW_ISA avx2
#include "simd/avx2.h"
#endif
#include "families/rows/rmsnorm.c"

static void quantise(const float *x, int8_t *q, float *d) {
    vi magnitude = vi_set1(0);
    for (int i = 0; i < 32; i += LANES)
        magnitude = vi_max(magnitude, vi_and(v_bits(v_load(x + i)), vi_set1(0x7FFFFFFF)));
    float top = pw_bits_to_float((uint32_t)vi_max_all(magnitude));
    float inverse = top < 0x1p-100f ? 0.0f : 127.0f / top;
    for (int i = 0; i < 32; i += LANES) vi_store_i8(q + i, v_round(v_mul(v_load(x + i), v_set1(inverse))));
    *d = top / 127.0f;
}

void rmsnorm_q8(int8_t *q, float *d, const float *x, const float *w, int n, float eps) {
    static float y[1 << 16];
    ISA(rmsnorm)(n, x, w, eps, y);
    for (int b = 0; b < n / 32; ++b) quantise(y + 32 * b, q + 32 * b, d + b);
}
