/* C[4][16] += A[4][k] B[k][16]: the tile of a matrix product that is held in registers. Rows of A are `lda` apart.
 *
 * @arg k least=0 most=512
 * @arg lda least=512 most=520
 * @arg a count=4*lda low=-1 high=1
 * @arg b count=k*16 low=-1 high=1
 * @arg c count=64 low=-1 high=1
 */
#include <immintrin.h>

void gemm_tile(float *c, const float *a, const float *b, int k, int lda) {
    __m256 c00 = _mm256_loadu_ps(c), c01 = _mm256_loadu_ps(c + 8);
    __m256 c10 = _mm256_loadu_ps(c + 16), c11 = _mm256_loadu_ps(c + 24);
    __m256 c20 = _mm256_loadu_ps(c + 32), c21 = _mm256_loadu_ps(c + 40);
    __m256 c30 = _mm256_loadu_ps(c + 48), c31 = _mm256_loadu_ps(c + 56);
    for (int p = 0; p < k; ++p) {
        const __m256 b0 = _mm256_loadu_ps(b + p * 16);
        const __m256 b1 = _mm256_loadu_ps(b + p * 16 + 8);
        const __m256 a0 = _mm256_broadcast_ss(a + p);
        c00 = _mm256_fmadd_ps(a0, b0, c00);
        c01 = _mm256_fmadd_ps(a0, b1, c01);
        const __m256 a1 = _mm256_broadcast_ss(a + lda + p);
        c10 = _mm256_fmadd_ps(a1, b0, c10);
        c11 = _mm256_fmadd_ps(a1, b1, c11);
        const __m256 a2 = _mm256_broadcast_ss(a + 2 * lda + p);
        c20 = _mm256_fmadd_ps(a2, b0, c20);
        c21 = _mm256_fmadd_ps(a2, b1, c21);
        const __m256 a3 = _mm256_broadcast_ss(a + 3 * lda + p);
        c30 = _mm256_fmadd_ps(a3, b0, c30);
        c31 = _mm256_fmadd_ps(a3, b1, c31);
    }
    _mm256_storeu_ps(c, c00);
    _mm256_storeu_ps(c + 8, c01);
    _mm256_storeu_ps(c + 16, c10);
    _mm256_storeu_ps(c + 24, c11);
    _mm256_storeu_ps(c + 32, c20);
    _mm256_storeu_ps(c + 40, c21);
    _mm256_storeu_ps(c + 48, c30);
    _mm256_storeu_ps(c + 56, c31);
}
