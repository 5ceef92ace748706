/* Rotary embedding, half-split: (a, b) = (x[i], x[half + i]) becomes factor * (a cos - b sin, b cos + a sin).
 * Absolute error <= factor * 2^-23 * (|a| + |b|) beside that of the cosines and sines given (correctly rounded from
 * float64), and of a rounding more where the factor is no power of two. */
void ISA(rope)(int64_t half, const pw_turn *turn, const float *x, float *y) {
    vf factor = v_set1(turn->factor);
    for (int64_t i = 0; i < half; i += LANES) {
        int count = half - i < LANES ? (int)(half - i) : LANES;
        vf c = v_load_n(turn->cosine + i, count), s = v_load_n(turn->sine + i, count);
        vf a = v_load_n(x + i, count), b = v_load_n(x + half + i, count);
        v_store_n(y + i, v_mul(v_sub(v_mul(a, c), v_mul(b, s)), factor), count);
        v_store_n(y + half + i, v_mul(v_fma(b, c, v_mul(a, s)), factor), count);
    }
}
