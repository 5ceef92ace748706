/* y[i] = x[i] * w[i] / sqrt(mean(x^2) + eps).
 * n >= 1, any alignment, x^2 must not overflow; float32 in and out, 4 * LANES partial sums in float32.
 * Relative error <= (n / LANES / 4 + LANES + 8) * 2^-24 against float64 (sums: Higham 2002, ch. 4; all terms >= 0). */
void ISA(rmsnorm)(int64_t n, const float *x, const float *w, float eps, float *y) {
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) /* four chains hide the latency of the fused add */
        for (int j = 0; j < 4; ++j) {
            vf v = v_load(x + i + j * LANES);
            sum[j] = v_fma(v, v, sum[j]);
        }
    for (; i + LANES <= n; i += LANES) {
        vf v = v_load(x + i);
        sum[0] = v_fma(v, v, sum[0]);
    }
    if (i < n) {
        vf v = v_load_n(x + i, (int)(n - i));
        sum[1] = v_fma(v, v, sum[1]);
    }
    float total = v_sum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
    vf scale = v_set1(1.0f / sqrtf(total / (float)n + eps));
    for (i = 0; i + LANES <= n; i += LANES) v_store(y + i, v_mul(v_mul(v_load(x + i), scale), v_load(w + i)));
    int rest = (int)(n - i);
    if (rest) v_store_n(y + i, v_mul(v_mul(v_load_n(x + i, rest), scale), v_load_n(w + i, rest)), rest);
}
