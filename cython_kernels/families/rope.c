/* Rotary embedding, half-split: (a, b) = (x[i], x[half + i]) becomes (a cos - b sin, b cos + a sin).
 * Absolute error <= 2^-23 * (|a| + |b|) beside that of the cosines and sines given (correctly rounded from float64). */
static void ISA(rope)(int64_t half, const float *cosine, const float *sine, float *x) {
    for (int64_t i = 0; i < half; i += LANES) {
        int count = half - i < LANES ? (int)(half - i) : LANES;
        vf c = v_load_n(cosine + i, count), s = v_load_n(sine + i, count);
        vf a = v_load_n(x + i, count), b = v_load_n(x + half + i, count);
        v_store_n(x + i, v_sub(v_mul(a, c), v_mul(b, s)), count);
        v_store_n(x + half + i, v_fma(b, c, v_mul(a, s)), count);
    }
}
