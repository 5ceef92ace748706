/* y = x * w / sqrt(mean of x^2 + eps).
 *
 * @arg n least=1 most=4096
 * @arg x count=n low=-4 high=4
 * @arg w count=n low=0.5 high=1.5
 * @arg eps low=0.00001 high=0.001
 * @arg y count=n out=True
 */
#include <immintrin.h>
#include <math.h>

void rmsnorm(float *y, const float *x, const float *w, int n, float eps) {
    __m256 squares = _mm256_setzero_ps();
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(squares), _mm256_extractf128_ps(squares, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_movehdup_ps(s));
    float sum = _mm_cvtss_f32(s);
    for (; i < n; ++i) sum += x[i] * x[i];

    const float scale = 1.0f / sqrtf(sum / (float)n + eps);
    const __m256 scales = _mm256_set1_ps(scale);
    for (i = 0; i + 8 <= n; i += 8) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), scales);
        _mm256_storeu_ps(y + i, _mm256_mul_ps(scaled, _mm256_loadu_ps(w + i)));
    }
    for (; i < n; ++i) y[i] = x[i] * scale * w[i];
}
