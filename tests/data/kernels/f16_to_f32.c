/* float16 to float32, eight at a time.
 *
 * @arg n least=0 most=4096
 * @arg x count=n low=-100 high=100 halves="*"
 * @arg y count=n out=True
 */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

void f16_to_f32(const uint16_t *x, float *y, size_t n) {
    size_t i = 0;
    for (; i + 7 < n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    }
    for (; i < n; ++i) y[i] = _cvtsh_ss(x[i]);
}
