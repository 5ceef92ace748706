/* exp(x) in the vocabulary's lanes: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, then the exponent n.
 *
 * Coefficients: Cephes expf (S. L. Moshier), degree 7. Range: below -87.68 the result is exactly 0 (no subnormals),
 * above 88.37 it stays at exp(88.37) ~ 2.4e38; exp(0) is exactly 1; NaN stays NaN.
 * Relative error for -87.3 <= x <= 88.37 against float64: at most 2 * 2^-24, with or without fused multiply-add
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

/* 2^x for x <= 127: a polynomial of degree 5 in x - n, n about floor(x), then the exponent n. 2^0 is exactly 1; below -126
 * the result may be exactly 0, below -126.5 it is; NaN stays NaN. Relative error at most 2.5 * 2^-24 (test_ops.py). */
PW_INLINE vf v_exp2(vf x) {
#ifdef __AVX512F__
    vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    x = v_max(v_set1(-126.5f), x);
    vi n = v_round(v_sub(x, v_set1(0.5f)));
    vf r = v_sub(x, vi_to_vf(n));
#endif
    vf p = v_fma(v_set1(1.8671305152e-3f), r, v_set1(9.0170288458e-3f));
    p = v_fma(p, r, v_set1(5.5799912661e-2f));
    p = v_fma(p, r, v_set1(2.4016444385e-1f));
    p = v_fma(p, r, v_set1(6.9315129519e-1f));
    p = v_fma(p, r, v_set1(1.0f));
#ifdef __AVX512F__
    __mmask16 kept = _mm512_cmp_ps_mask(x, v_set1(-126.0f), _CMP_NLT_UQ); /* NaN is kept */
    return _mm512_maskz_scalef_ps(kept, p, x); /* of an exponent the floor counts */
#else
    return v_mul(p, vi_as_vf(vi_shl(vi_add(n, vi_set1(127)), 23)));
#endif
}

/* The first n lanes of v; the others hold `rest`. */
PW_INLINE vf v_first(vf v, int n, float rest) {
    float lanes[LANES];
    v_store(lanes, v_set1(rest));
    v_store_n(lanes, v, n);
    return v_load(lanes);
}

#endif
