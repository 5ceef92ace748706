/* y = x * w / sqrt(mean of x^2 + eps), with the sums of phasewise's own: four times sixteen in turns of 64 numbers.
 *
 * @arg n least=1 most=4096
 * @arg x count=n low=-4 high=4
 * @arg w count=n low=0.5 high=1.5
 * @arg eps low=0.00001 high=0.001
 * @arg y count=n out=True
 */
#include <immintrin.h>
#include <math.h>

void rms_norm(float *y, const float *x, const float *w, int n, float eps) {
    __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps(), sum2 = _mm512_setzero_ps(), sum3 = _mm512_setzero_ps();
    int i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
        const __m512 c = _mm512_loadu_ps(x + i + 32), d = _mm512_loadu_ps(x + i + 48);
        sum0 = _mm512_fmadd_ps(a, a, sum0);
        sum1 = _mm512_fmadd_ps(b, b, sum1);
        sum2 = _mm512_fmadd_ps(c, c, sum2);
        sum3 = _mm512_fmadd_ps(d, d, sum3);
    }
    for (; i + 16 <= n; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        sum0 = _mm512_fmadd_ps(v, v, sum0);
    }
    float rest[16] = {0.0f};
    for (int k = i; k < n; ++k) rest[k - i] = x[k];
    const __m512 last = _mm512_loadu_ps(rest);
    sum1 = _mm512_fmadd_ps(last, last, sum1);
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum0, sum1), _mm512_add_ps(sum2, sum3)));

    const float scale = 1.0f / sqrtf(sum / (float)n + eps);
    const __m512 scales = _mm512_set1_ps(scale);
    for (i = 0; i + 16 <= n; i += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), scales);
        _mm512_storeu_ps(y + i, _mm512_mul_ps(scaled, _mm512_loadu_ps(w + i)));
    }
    for (; i < n; ++i) y[i] = x[i] * scale * w[i];
}
