/* y = x / (1 + e^-x) * gate.
 *
 * @arg n least=0 most=4096
 * @arg x count=n low=-30 high=30
 * @arg gate count=n low=-2 high=2
 * @arg y count=n out=True
 */
#include <immintrin.h>
#include <math.h>

static inline __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(87.0f));
    const __m256 k = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(k, _mm256_set1_ps(0.693145752f), x);
    r = _mm256_fnmadd_ps(k, _mm256_set1_ps(1.42860677e-6f), r);
    __m256 p = _mm256_set1_ps(0.0083333333f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.0416666667f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.166666667f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

void silu_gate(float *y, const float *x, const float *gate, int n) {
    const __m256 one = _mm256_set1_ps(1.0f);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const __m256 e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), v));
        const __m256 silu = _mm256_div_ps(v, _mm256_add_ps(one, e));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(silu, _mm256_loadu_ps(gate + i)));
    }
    for (; i < n; ++i) y[i] = x[i] / (1.0f + expf(-x[i])) * gate[i];
}
