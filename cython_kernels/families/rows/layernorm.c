/* y[i] = (t[i] - mean(t)) / sqrt(var(t) + eps) * w[i] + b[i], t = x + bias; bias may be NULL, y may be x.
 * n >= 1, any alignment; float32 in and out. Two passes: the mean first, then squares of what is left of it.
 *
 * Error against float64, with u = 2^-24, s = sqrt(var + eps), d = t - mean, g = n / LANES / 4 + LANES + 4:
 *     e_i = u (2 |t_i| + g mean|t| + |d_i|)                          what rounds of t, its mean and their difference
 *     |error_i| <= |w_i| / s (e_i + |d_i| (rms(e) / s + (g / 2 + 8) u)) + 4 u (|w_i d_i| / s + |b_i|)
 * (sums: Higham 2002, ch. 4; the root halves the relative error of a variance). */
PW_INLINE float all_lanes(const vf *sum) { return v_sum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3]))); }

PW_INLINE vf with_bias(const float *x, const float *bias, int64_t i, float *t) {
    vf v = v_load(x + i);
    if (bias) v = v_add(v, v_load(bias + i));
    v_store(t + i, v);
    return v;
}

static float biased_mean(int64_t n, const float *x, const float *bias, float *t) {
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) /* four chains hide the latency of the sum */
        for (int j = 0; j < 4; ++j) sum[j] = v_add(sum[j], with_bias(x, bias, i + j * LANES, t));
    for (; i + LANES <= n; i += LANES) sum[0] = v_add(sum[0], with_bias(x, bias, i, t));
    int rest = (int)(n - i);
    if (rest) {
        vf v = v_load_n(x + i, rest);
        if (bias) v = v_add(v, v_load_n(bias + i, rest));
        v_store_n(t + i, v, rest);
        sum[1] = v_add(sum[1], v);
    }
    return all_lanes(sum) / (float)n;
}

static float inverse_deviation(int64_t n, const float *t, float mean, float eps) {
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()}, m = v_set1(mean);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; ++j) {
            vf d = v_sub(v_load(t + i + j * LANES), m);
            sum[j] = v_fma(d, d, sum[j]);
        }
    for (; i + LANES <= n; i += LANES) {
        vf d = v_sub(v_load(t + i), m);
        sum[0] = v_fma(d, d, sum[0]);
    }
    int rest = (int)(n - i);
    if (rest) {
        vf d = v_first(v_sub(v_load_n(t + i, rest), m), rest, 0.0f);
        sum[1] = v_fma(d, d, sum[1]);
    }
    return 1.0f / sqrtf(all_lanes(sum) / (float)n + eps);
}

void ISA(layernorm)(int64_t n, const float *x, const float *bias, const pw_norm *norm, float *y) {
    float mean = biased_mean(n, x, bias, y);
    vf m = v_set1(mean), scale = v_set1(inverse_deviation(n, y, mean, norm->eps));
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf d = v_mul(v_sub(v_load(y + i), m), scale);
        v_store(y + i, v_fma(d, v_load(norm->weight + i), v_load(norm->bias + i)));
    }
    int rest = (int)(n - i);
    if (!rest) return;
    vf d = v_mul(v_sub(v_load_n(y + i, rest), m), scale);
    v_store_n(y + i, v_fma(d, v_load_n(norm->weight + i, rest), v_load_n(norm->bias + i, rest)), rest);
}
