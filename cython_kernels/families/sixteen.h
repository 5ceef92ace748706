/* Sums over rows, in the same order on every ISA (docs/arithmetic.md): sixteen partial sums, of which number i takes the
 * elements i, 16 + i, 32 + i and so on, and at the end halves that are added: i and i + 8, i and i + 4, i and i + 2, the two
 * that are left. One vector of AVX-512, two of AVX2, four of NEON. */
#ifndef PHASEWISE_FAMILIES_SIXTEEN_H
#define PHASEWISE_FAMILIES_SIXTEEN_H

enum { SIXTEEN = 16, PARTS_OF_SIXTEEN = SIXTEEN / LANES };

typedef struct {
    vf part[PARTS_OF_SIXTEEN];
} sixteen;

PW_INLINE sixteen no_sums(void) {
    sixteen sum;
    PW_UNROLL for (int i = 0; i < PARTS_OF_SIXTEEN; ++i) sum.part[i] = v_zero();
    return sum;
}

PW_INLINE sixteen add_sixteen(sixteen a, sixteen b) {
    PW_UNROLL for (int i = 0; i < PARTS_OF_SIXTEEN; ++i) a.part[i] = v_add(a.part[i], b.part[i]);
    return a;
}

PW_INLINE float sum_of_sixteen(sixteen sum) {
    PW_UNROLL for (int half = PARTS_OF_SIXTEEN / 2; half; half /= 2) {
        PW_UNROLL for (int i = 0; i < half; ++i) sum.part[i] = v_add(sum.part[i], sum.part[i + half]);
    }
    return v_sum(sum.part[0]);
}

/* How many of `count` elements are in part i of sixteen: 0 to LANES. */
PW_INLINE int of_part(int64_t count, int i) {
    int64_t left = count - i * LANES;
    return left <= 0 ? 0 : left < LANES ? (int)left : LANES;
}

#endif
