/* y[i] = x[i] * w[i] / sqrt(mean(x^2) + eps).
 * n >= 1, any alignment, x^2 must not overflow; float32 in and out. Sums: four times sixteen in turns of 64 elements; what is
 * left is added to the first sixteen as far as it fills them, and the rest to the second.
 * Relative error <= (n / 64 + 16 + 8) * 2^-24 against float64 (sums: Higham 2002, ch. 4; all terms >= 0). */
PW_INLINE sixteen add_squares(sixteen sum, const float *x) {
    PW_UNROLL for (int i = 0; i < PARTS_OF_SIXTEEN; ++i) {
        vf v = v_load(x + i * LANES);
        sum.part[i] = v_fma(v, v, sum.part[i]);
    }
    return sum;
}

static float sum_of_squares(int64_t n, const float *x) {
    sixteen sum[4] = {no_sums(), no_sums(), no_sums(), no_sums()};
    int64_t i = 0;
    for (; i + 4 * SIXTEEN <= n; i += 4 * SIXTEEN) /* four chains hide the latency of the fused add */
        PW_UNROLL for (int j = 0; j < 4; ++j) sum[j] = add_squares(sum[j], x + i + j * SIXTEEN);
    for (; i + SIXTEEN <= n; i += SIXTEEN) sum[0] = add_squares(sum[0], x + i);
    PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
        int rest = of_part(n - i, part);
        if (!rest) continue;
        vf v = v_load_n(x + i + part * LANES, rest);
        sum[1].part[part] = v_fma(v, v, sum[1].part[part]);
    }
    return sum_of_sixteen(add_sixteen(add_sixteen(sum[0], sum[1]), add_sixteen(sum[2], sum[3])));
}

void ISA(rmsnorm)(int64_t n, const float *x, const float *w, float eps, float *y) {
    vf scale = v_set1(1.0f / sqrtf(sum_of_squares(n, x) / (float)n + eps));
    EACH_ELEMENT(n, y, v_mul(v_mul(LOAD(x + i), scale), LOAD(w + i)));
}
