/* isa/avx512_bf16.h over the portable vocabulary, for any CPU: vdpbf16ps as Intel specifies it (SDM, volume 2). Of each
 * pair the upper product is added first; subnormals count as zero on the way in and out. */
#pragma GCC diagnostic ignored "-Wunused-function" /* not every family has words for them */
#define PW_ISA avx512_bf16
#include "simd/portable.h"

#define PW_BF16_DOT_WORDS 1

static float without_subnormals(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* The number in the upper half of a lane. */
static float upper_bf16(uint32_t bits) {
    float x;
    bits &= 0xFFFF0000u;
    memcpy(&x, &bits, sizeof x);
    return without_subnormals(x);
}

static vf bf16_dot(vf acc, vi w, vi a) {
    for (int i = 0; i < LANES; ++i) {
        uint32_t x = (uint32_t)w[i], y = (uint32_t)a[i];
        float sum = without_subnormals(fmaf(upper_bf16(x), upper_bf16(y), without_subnormals(acc[i])));
        acc[i] = without_subnormals(fmaf(upper_bf16(x << 16), upper_bf16(y << 16), sum));
    }
    return acc;
}
