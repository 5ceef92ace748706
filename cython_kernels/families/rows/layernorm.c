/* y[i] = (t[i] - mean(t)) / sqrt(var(t) + eps) * w[i] + b[i], t = x + bias; bias may be NULL, y may be x.
 * n >= 1, any alignment; float32 in and out. Two passes: the mean first, then squares of what is left of it,
 * both summed as in rmsnorm.c.
 *
 * Error against float64, with u = 2^-24, s = sqrt(var + eps), d = t - mean, g = n / 64 + 16 + 4:
 *     e_i = u (2 |t_i| + g mean|t| + |d_i|)                          what rounds of t, its mean and their difference
 *     |error_i| <= |w_i| / s (e_i + |d_i| (rms(e) / s + (g / 2 + 8) u)) + 4 u (|w_i d_i| / s + |b_i|)
 * (sums: Higham 2002, ch. 4; the root halves the relative error of a variance). */
PW_INLINE vf with_bias(const float *x, const float *bias, int64_t i, int count, float *t) {
    vf v = bias ? v_add(LOAD(x + i), LOAD(bias + i)) : LOAD(x + i);
    if (count == LANES) v_store(t + i, v);
    else v_store_n(t + i, v, count);
    return v;
}

PW_INLINE sixteen add_biased(sixteen sum, const float *x, const float *bias, int64_t i, float *t) {
    PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part)
        sum.part[part] = v_add(sum.part[part], with_bias(x, bias, i + part * LANES, LANES, t));
    return sum;
}

PW_INLINE float all_sums(const sixteen *sum) {
    return sum_of_sixteen(add_sixteen(add_sixteen(sum[0], sum[1]), add_sixteen(sum[2], sum[3])));
}

static float biased_mean(int64_t n, const float *x, const float *bias, float *t) {
    sixteen sum[4] = {no_sums(), no_sums(), no_sums(), no_sums()};
    int64_t i = 0;
    for (; i + 4 * SIXTEEN <= n; i += 4 * SIXTEEN) /* four chains hide the latency of the sum */
        PW_UNROLL for (int j = 0; j < 4; ++j) sum[j] = add_biased(sum[j], x, bias, i + j * SIXTEEN, t);
    for (; i + SIXTEEN <= n; i += SIXTEEN) sum[0] = add_biased(sum[0], x, bias, i, t);
    PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
        int rest = of_part(n - i, part);
        if (rest) sum[1].part[part] = v_add(sum[1].part[part], with_bias(x, bias, i + part * LANES, rest, t));
    }
    return all_sums(sum) / (float)n;
}

PW_INLINE sixteen add_deviations(sixteen sum, const float *t, vf mean) {
    PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
        vf d = v_sub(v_load(t + part * LANES), mean);
        sum.part[part] = v_fma(d, d, sum.part[part]);
    }
    return sum;
}

static float inverse_deviation(int64_t n, const float *t, float mean, float eps) {
    sixteen sum[4] = {no_sums(), no_sums(), no_sums(), no_sums()};
    vf m = v_set1(mean);
    int64_t i = 0;
    for (; i + 4 * SIXTEEN <= n; i += 4 * SIXTEEN)
        PW_UNROLL for (int j = 0; j < 4; ++j) sum[j] = add_deviations(sum[j], t + i + j * SIXTEEN, m);
    for (; i + SIXTEEN <= n; i += SIXTEEN) sum[0] = add_deviations(sum[0], t + i, m);
    PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
        int rest = of_part(n - i, part);
        if (!rest) continue;
        vf d = v_first(v_sub(v_load_n(t + i + part * LANES, rest), m), rest, 0.0f);
        sum[1].part[part] = v_fma(d, d, sum[1].part[part]);
    }
    return 1.0f / sqrtf(all_sums(sum) / (float)n + eps);
}

void ISA(layernorm)(int64_t n, const float *x, const float *bias, const pw_norm *norm, float *y) {
    float mean = biased_mean(n, x, bias, y);
    vf m = v_set1(mean), scale = v_set1(inverse_deviation(n, y, mean, norm->eps));
    EACH_ELEMENT(n, y, v_fma(v_mul(v_sub(LOAD(y + i), m), scale), LOAD(norm->weight + i), LOAD(norm->bias + i)));
}
