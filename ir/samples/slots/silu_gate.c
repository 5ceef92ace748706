/* y = gate / (1 + e^-gate) * up, by phasewise's own exponential.
 *
 * @arg n least=1 most=4096
 * @arg gate count=n low=-30 high=30
 * @arg up count=n low=-2 high=2
 * @arg y count=n out=True
 */
#include <immintrin.h>

/* Cephes: x = n ln 2 + r, a polynomial in r, then the exponent n. The second of max and min is there where either is NaN. */
static inline __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88.37f), _mm512_max_ps(_mm512_set1_ps(-88.0f), x));
    const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
    const __m512 whole = _mm512_cvtepi32_ps(n);
    __m512 r = _mm512_fmadd_ps(whole, _mm512_set1_ps(-0.693359375f), x);
    r = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.9875691500e-4f), r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(p, _mm512_castsi512_ps(power));
}

static inline __m512 silu(__m512 gate) {
    const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    return _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

void silu_gate(float *y, const float *gate, const float *up, int n) {
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 gated = silu(_mm512_loadu_ps(gate + i));
        _mm512_storeu_ps(y + i, _mm512_mul_ps(gated, _mm512_loadu_ps(up + i)));
    }
    float rest[16] = {0.0f};
    for (int k = i; k < n; ++k) rest[k - i] = gate[k];
    _mm512_storeu_ps(rest, silu(_mm512_loadu_ps(rest)));
    for (; i < n; ++i) y[i] = rest[i % 16] * up[i];
}
