/* Rotary position embedding of neighbouring pairs: (a, b) becomes (a cos - b sin, a sin + b cos).
 * `angles` holds a cosine and a sine for each pair, as (cos, sin).
 *
 * @arg n least=0 most=1024 multiple=2
 * @arg x count=n low=-3 high=3
 * @arg angles count=n low=-1 high=1
 */
#include <immintrin.h>
#include <math.h>

void rope(float *x, const float *angles, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 pairs = _mm256_loadu_ps(x + i);
        const __m256 turn = _mm256_loadu_ps(angles + i);
        const __m256 cosines = _mm256_moveldup_ps(turn);
        const __m256 sines = _mm256_movehdup_ps(turn);
        const __m256 swapped = _mm256_permute_ps(pairs, 0xB1);
        const __m256 crossed = _mm256_mul_ps(swapped, sines);
        _mm256_storeu_ps(x + i, _mm256_fmaddsub_ps(pairs, cosines, crossed));
    }
    for (; i < n; i += 2) {
        const float a = x[i], b = x[i + 1], c = angles[i], s = angles[i + 1];
        x[i] = fmaf(a, c, -(b * s));
        x[i + 1] = fmaf(b, c, a * s);
    }
}
