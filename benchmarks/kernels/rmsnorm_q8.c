/* RMSNorm, then bytes with a scale for each 32: q = rint(v 127 / max|v|), d = max|v| / 127, in one pass over the result.
 *
 * @arg n least=32 most=4096 multiple=32
 * @arg x count=n low=-4 high=4
 * @arg w count=n low=0.5 high=1.5
 * @arg eps low=0.00001 high=0.001
 * @arg q count=n out=True
 * @arg d count=n//32 out=True
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

static inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline float max8(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline __m256 magnitude(__m256 v) {
    return _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
}

void rmsnorm_q8(int8_t *q, float *d, const float *x, const float *w, int n, float eps) {
    __m256 squares = _mm256_setzero_ps();
    for (int i = 0; i < n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    const __m256 scale = _mm256_set1_ps(1.0f / sqrtf(sum8(squares) / (float)n + eps));
    for (int b = 0; b < n / 32; ++b) {
        const float *from = x + b * 32, *by = w + b * 32;
        const __m256 v0 = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(from), scale), _mm256_loadu_ps(by));
        const __m256 v1 = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(from + 8), scale), _mm256_loadu_ps(by + 8));
        const __m256 v2 = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(from + 16), scale), _mm256_loadu_ps(by + 16));
        const __m256 v3 = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(from + 24), scale), _mm256_loadu_ps(by + 24));
        const __m256 top01 = _mm256_max_ps(magnitude(v0), magnitude(v1));
        const __m256 top23 = _mm256_max_ps(magnitude(v2), magnitude(v3));
        const float top = max8(_mm256_max_ps(top01, top23));
        const __m256 inverse = _mm256_set1_ps(top > 0.0f ? 127.0f / top : 0.0f);
        const __m256i i0 = _mm256_cvtps_epi32(_mm256_mul_ps(v0, inverse));
        const __m256i i1 = _mm256_cvtps_epi32(_mm256_mul_ps(v1, inverse));
        const __m256i i2 = _mm256_cvtps_epi32(_mm256_mul_ps(v2, inverse));
        const __m256i i3 = _mm256_cvtps_epi32(_mm256_mul_ps(v3, inverse));
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(i0, i1), _mm256_packs_epi32(i2, i3));
        const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(q + b * 32), ordered);
        d[b] = top / 127.0f;
    }
}
