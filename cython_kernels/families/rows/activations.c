/* y[i] = act(x[i] + bias[i]): what a feed-forward layer without a gate goes through. bias may be NULL, y may be x.
 *
 * gelu: t / 2 (1 + erf(t / sqrt 2)). erf(t / sqrt 2) is t P(t^2) / Q(t^2) within 6.5 * 2^-24 of itself for |t| <= 5.625
 * (coefficients: weighted least squares, both of degree 5, relative error 2.3e-8 before rounding), times 1 + 2^-21, so that
 * it reaches 1 where it is kept there: results below -5.625 are 0. |error| <= 10 * 2^-24 |t|, and u more |act'| |t| of the sum.
 * gelu_tanh: t logistic(2 u), the bound of the gate (elementwise.c). silu: 6 * 2^-24 relative. relu: exact.
 * relu2: relu(t)^2, rounded once. */
PW_INLINE vf gelu_tanh_lanes(vf t) { return gelu_tanh_gate_lanes(t, v_set1(1.0f)); }
PW_INLINE vf silu_lanes(vf t) { return times_logistic(t, t); }
PW_INLINE vf relu_lanes(vf t) { return v_max(v_zero(), t); } /* of a NaN the NaN */
PW_INLINE vf relu2_lanes(vf t) { return v_mul(relu_lanes(t), relu_lanes(t)); }

#define ACTIVATION(NAME)                                                                             \
    void ISA(NAME)(int64_t n, const float *x, const float *bias, float *y) {                  \
        int64_t i = 0;                                                                               \
        for (; i + LANES <= n; i += LANES) {                                                         \
            vf t = v_load(x + i);                                                                    \
            if (bias) t = v_add(t, v_load(bias + i));                                                \
            v_store(y + i, NAME##_lanes(t));                                                         \
        }                                                                                            \
        int rest = (int)(n - i);                                                                     \
        if (!rest) return;                                                                           \
        vf t = v_load_n(x + i, rest);                                                                \
        if (bias) t = v_add(t, v_load_n(bias + i, rest));                                            \
        v_store_n(y + i, NAME##_lanes(t), rest);                                                     \
    }
PW_EACH_ACTIVATION(ACTIVATION)
