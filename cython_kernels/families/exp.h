/* exp(x) in the vocabulary's lanes: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, then the exponent n.
 *
 * Coefficients: Cephes expf (S. L. Moshier), degree 7. Range: below -87.68 the result is exactly 0 (no subnormals),
 * above 88.37 it stays at exp(88.37) ~ 2.4e38; exp(0) is exactly 1; NaN stays NaN.
 * Relative error for -87.3 <= x <= 88.37 against float64: at most 2 * 2^-24
 * (1.34 seen over every 997th float of the range, test_ops.py; ln 2 is split so that n * 0.693359375 is exact). */
#ifndef PHASEWISE_FAMILIES_EXP_H
#define PHASEWISE_FAMILIES_EXP_H

PW_INLINE vf v_exp(vf x) {
    x = v_min(v_set1(88.37f), v_max(v_set1(-88.0f), x)); /* the second argument survives where it is NaN */
    vi n = v_round(v_mul(x, v_set1(1.44269504f)));
    vf whole = vi_to_vf(n);
    vf r = v_fma(whole, v_set1(-0.693359375f), x);
    r = v_fma(whole, v_set1(2.12194440e-4f), r);
    vf p = v_fma(v_set1(1.9875691500e-4f), r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    return v_mul(p, vi_as_vf(vi_shl(vi_add(n, vi_set1(127)), 23))); /* n = -127 makes the factor 0 */
}

/* 2^x for x <= 127: n the whole number nearest to x (of two the one with n + 127 even), a polynomial of degree 5 in x - n,
 * then the exponent n. The sum with EXP2_SHIFT has n + 127 in its low bits. 2^0 is exactly 1; below -126.5 the result is
 * exactly 0; NaN stays NaN. Coefficients: weighted least squares, relative error 1.53 * 2^-24 before rounding. Relative error
 * at most 3 * 2^-24 (2.84 seen over 2 10^7 numbers of the range). */
#define EXP2_SHIFT (12582912.0f + 127.0f)
PW_INLINE vf v_exp2(vf x) {
    x = v_max(v_set1(-127.0f), x); /* the second argument survives where it is NaN */
    vf shifted = v_add(x, v_set1(EXP2_SHIFT));
    vf r = v_sub(x, v_sub(shifted, v_set1(EXP2_SHIFT)));
    vf p = v_fma(v_set1(0x1.5bba14p-10f), r, v_set1(0x1.3cea88p-7f));
    p = v_fma(p, r, v_set1(0x1.c6b752p-5f));
    p = v_fma(p, r, v_set1(0x1.ebf9bcp-3f));
    p = v_fma(p, r, v_set1(0x1.62e42ap-1f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_mul(p, vi_as_vf(vi_shl(v_bits(shifted), 23))); /* n = -127 makes the factor 0 */
}

/* The first n lanes of v; the others hold `rest`. */
PW_INLINE vf v_first(vf v, int n, float rest) {
    float lanes[LANES];
    v_store(lanes, v_set1(rest));
    v_store_n(lanes, v, n);
    return v_load(lanes);
}

#endif
