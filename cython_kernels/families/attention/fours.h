/* The sums and the largest numbers of several rows: in AVX-512 of four at once, with half the shuffles of one by one. */
#ifndef PHASEWISE_FAMILIES_ATTENTION_FOURS_H
#define PHASEWISE_FAMILIES_ATTENTION_FOURS_H

#include "families/sixteen.h"

#ifdef __AVX512F__
/* Of each of four vectors: halves, as in sum_of_sixteen, of all four at once. */
#define PW_STORE_OF_FOUR(name, with)                                                                  \
    PW_INLINE void name(float *p, vf a, vf b, vf c, vf d) {                                           \
        vf ab = with(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));             \
        vf cd = with(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));             \
        vf quarters = with(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));   \
        vf eighths = with(quarters, _mm512_permute_ps(quarters, 0x4E));                               \
        vf all = with(eighths, _mm512_permute_ps(eighths, 0xB1));                                     \
        __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);           \
        _mm_storeu_ps(p, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all)));                 \
    }
PW_STORE_OF_FOUR(store_sums_of_four, v_add)
PW_STORE_OF_FOUR(store_tops_of_four, v_max)
#endif

/* sum_of_sixteen of each. */
PW_INLINE void sums_of(int n, const sixteen *x, float *out) {
    int i = 0;
#ifdef __AVX512F__
    for (; i + 4 <= n; i += 4)
        store_sums_of_four(out + i, x[i].part[0], x[i + 1].part[0], x[i + 2].part[0], x[i + 3].part[0]);
#endif
    for (; i < n; ++i) out[i] = sum_of_sixteen(x[i]);
}

/* The largest of each vector; where one holds NaN, any of it. */
static void tops_of(int n, const vf *x, float *out) {
    int i = 0;
#ifdef __AVX512F__
    for (; i + 4 <= n; i += 4) store_tops_of_four(out + i, x[i], x[i + 1], x[i + 2], x[i + 3]);
#endif
    for (; i < n; ++i) out[i] = v_max_all(x[i]);
}

#endif
