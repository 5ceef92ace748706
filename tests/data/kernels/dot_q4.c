/* Dot product of four-bit numbers (offset 8, float16 scale for each 32) with bytes of the same blocks.
 *
 * @arg n least=0 most=4096 multiple=32
 * @arg x count=n//32 low=-0.1 high=0.1 halves="d"
 * @arg y count=n//32 low=-0.1 high=0.1 halves="d"
 */
#include <immintrin.h>
#include <stdint.h>

typedef struct {
    uint16_t d;
    uint8_t qs[16];
} block_q4;

typedef struct {
    uint16_t d;
    int8_t qs[32];
} block_q8;

static inline __m256i nibbles(const uint8_t *p) {
    const __m128i packed = _mm_loadu_si128((const __m128i *)p);
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

float dot_q4(const block_q4 *x, const block_q8 *y, int n) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i eight = _mm256_set1_epi8(8);
    __m256 sum = _mm256_setzero_ps();
    for (int b = 0; b < n / 32; ++b) {
        const float d = _cvtsh_ss(x[b].d) * _cvtsh_ss(y[b].d);
        const __m256i qx = nibbles(x[b].qs);
        const __m256i qy = _mm256_loadu_si256((const __m256i *)y[b].qs);
        const __m256i with_offset = _mm256_madd_epi16(_mm256_maddubs_epi16(qx, qy), ones);
        const __m256i offset = _mm256_madd_epi16(_mm256_maddubs_epi16(eight, qy), ones);
        const __m256 whole = _mm256_cvtepi32_ps(_mm256_sub_epi32(with_offset, offset));
        sum = _mm256_fmadd_ps(_mm256_set1_ps(d), whole, sum);
    }
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    s = _mm_hadd_ps(s, s);
    s = _mm_hadd_ps(s, s);
    return _mm_cvtss_f32(s);
}
