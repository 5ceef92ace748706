/* Dot product of bfloat16: the upper halves of float32, widened by a shift.
 *
 * @arg n least=0 most=4096
 * @arg x count=n low=14000 high=16250
 * @arg y count=n low=14000 high=16250
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static inline __m256 load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

float dot_bf16(const uint16_t *x, const uint16_t *y, int n) {
    __m256 sum0 = _mm256_setzero_ps(), sum1 = _mm256_setzero_ps();
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        sum0 = _mm256_fmadd_ps(load_bf16(x + i), load_bf16(y + i), sum0);
        sum1 = _mm256_fmadd_ps(load_bf16(x + i + 8), load_bf16(y + i + 8), sum1);
    }
    __m256 sum = _mm256_add_ps(sum0, sum1);
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    half = _mm_add_ss(half, _mm_movehdup_ps(half));
    float total = _mm_cvtss_f32(half);
    for (; i < n; ++i) total += from_bf16(x[i]) * from_bf16(y[i]);
    return total;
}
