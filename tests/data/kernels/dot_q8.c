/* Dot product of bytes in blocks of 32 with a float16 scale each. Signs move to the second factor, because the byte
 * instruction multiplies unsigned by signed.
 *
 * @arg n least=0 most=4096 multiple=32
 * @arg x count=n//32 low=-0.01 high=0.01 halves="d"
 * @arg y count=n//32 low=-0.01 high=0.01 halves="d"
 */
#include <immintrin.h>
#include <stdint.h>

typedef struct {
    uint16_t d;
    int8_t qs[32];
} block_q8;

static inline __m256 products(__m256i x, __m256i y) {
    const __m256i magnitudes = _mm256_sign_epi8(x, x);
    const __m256i signs = _mm256_sign_epi8(y, x);
    const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signs);
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

float dot_q8(const block_q8 *x, const block_q8 *y, int n) {
    const int n_blocks = n / 32;
    __m256 sum = _mm256_setzero_ps();
    for (int b = 0; b < n_blocks; ++b) {
        const __m256 scale = _mm256_set1_ps(_cvtsh_ss(x[b].d) * _cvtsh_ss(y[b].d));
        const __m256i qx = _mm256_loadu_si256((const __m256i *)x[b].qs);
        const __m256i qy = _mm256_loadu_si256((const __m256i *)y[b].qs);
        sum = _mm256_fmadd_ps(scale, products(qx, qy), sum);
    }
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
