/* Dot product of float32: eight lanes at once, the rest one by one.
 *
 * @arg n least=0 most=4096
 * @arg x count=n low=-1 high=1
 * @arg y count=n low=-1 high=1
 */
#include <immintrin.h>

static inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

float dot_f32(const float *x, const float *y, int n) {
    __m256 sums = _mm256_setzero_ps();
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        sums = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i), sums);
    }
    float sum = sum8(sums);
    for (; i < n; ++i) {
        sum += x[i] * y[i];
    }
    return sum;
}
