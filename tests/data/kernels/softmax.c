/* Softmax in two passes: the maximum and the sum of exponentials together (a larger maximum rescales the sum), then the
 * quotients.
 *
 * @arg n least=1 most=2048
 * @arg x count=n low=-20 high=20
 * @arg y count=n out=True
 */
#include <immintrin.h>
#include <math.h>

/* e^x for x <= 0: 2^k times a polynomial of degree 5 in the rest; below -87 the smallest normal numbers. */
static inline __m256 exp8(__m256 x) {
    x = _mm256_max_ps(x, _mm256_set1_ps(-87.0f));
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

static inline float max8(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

void softmax(float *y, const float *x, int n) {
    __m256 highest = _mm256_set1_ps(-INFINITY), sums = _mm256_setzero_ps();
    int i = 0;
    if (n >= 8) highest = _mm256_loadu_ps(x);
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const __m256 higher = _mm256_max_ps(v, highest);
        sums = _mm256_fmadd_ps(sums, exp8(_mm256_sub_ps(highest, higher)), exp8(_mm256_sub_ps(v, higher)));
        highest = higher;
    }
    float m = x[0];
    if (i > 0) m = max8(highest);
    for (int k = i; k < n; ++k) m = x[k] > m ? x[k] : m;
    float sum = 0.0f;
    if (i > 0) sum = sum8(_mm256_mul_ps(sums, exp8(_mm256_sub_ps(highest, _mm256_set1_ps(m)))));
    for (int k = i; k < n; ++k) sum += expf(x[k] - m);

    const float scale = 1.0f / sum;
    for (i = 0; i + 8 <= n; i += 8) {
        const __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(m)));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(e, _mm256_set1_ps(scale)));
    }
    for (; i < n; ++i) y[i] = expf(x[i] - m) * scale;
}
