/* Attention of one query over one head, in one pass over the keys: scores raise the maximum, and then everything summed
 * so far is rescaled.
 *
 * @arg dim least=8 most=128 multiple=8
 * @arg tokens least=1 most=96
 * @arg scale low=0.05 high=0.2
 * @arg q count=dim low=-1 high=1
 * @arg keys count=tokens*dim low=-1 high=1
 * @arg values count=tokens*dim low=-1 high=1
 * @arg out count=dim out=True
 */
#include <immintrin.h>
#include <math.h>

static inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

void attention(float *out, const float *q, const float *keys, const float *values, int tokens, int dim, float scale) {
    float highest = -INFINITY, sum = 0.0f;
    for (int d = 0; d < dim; d += 8) _mm256_storeu_ps(out + d, _mm256_setzero_ps());
    for (int t = 0; t < tokens; ++t) {
        const float *key = keys + t * dim;
        const float *value = values + t * dim;
        __m256 products = _mm256_setzero_ps();
        for (int d = 0; d < dim; d += 8) {
            products = _mm256_fmadd_ps(_mm256_loadu_ps(q + d), _mm256_loadu_ps(key + d), products);
        }
        const float score = sum8(products) * scale;
        if (score > highest) {
            const float shrink = expf(highest - score);
            const __m256 by = _mm256_set1_ps(shrink);
            for (int d = 0; d < dim; d += 8) {
                _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(out + d), by));
            }
            sum *= shrink;
            highest = score;
        }
        const float weight = expf(score - highest);
        const __m256 weights = _mm256_set1_ps(weight);
        sum += weight;
        for (int d = 0; d < dim; d += 8) {
            const __m256 v = _mm256_loadu_ps(value + d);
            _mm256_storeu_ps(out + d, _mm256_fmadd_ps(weights, v, _mm256_loadu_ps(out + d)));
        }
    }
    const __m256 by = _mm256_set1_ps(1.0f / sum);
    for (int d = 0; d < dim; d += 8) _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(out + d), by));
}
