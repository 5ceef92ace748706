/* y[i] = act(x[i] + bias[i]): what a feed-forward layer without a gate goes through. bias may be NULL, y may be x. xielu takes
 * numbers of its layer in place of biases.
 *
 * gelu: t / 2 (1 + erf(t / sqrt 2)). erf(t / sqrt 2) is t P(t^2) / Q(t^2) within 6.5 * 2^-24 of itself for |t| <= 5.625
 * (coefficients: weighted least squares, both of degree 5, relative error 2.3e-8 before rounding), times 1 + 2^-21, so that
 * it reaches 1 where it is kept there: results below -5.625 are 0. |error| <= 10 * 2^-24 |t|, and u more |act'| |t| of the sum.
 * gelu_tanh: t logistic(2 u), the bound of the gate (elementwise.c). silu: 6 * 2^-24 relative. relu: exact.
 * relu2: relu(t)^2, rounded once.
 * xielu (Huang and Schlag 2024) with the numbers p, n, b and e: t (p t + b) above 0, else n (exp(m) - 1 - t) + b t with
 * m = min(t, e). exp(m) - 1 - m is r = c^2 P(c), c = max(m, -1) (coefficients: weighted least squares, relative error
 * 0.4 * 2^-24 before rounding), and behind -1 (exp(m) - exp(-1)) + (-1 - m) more. |error| <= 2 * 2^-24 (|p| t^2 + |b t|) above
 * 0, else 2^-24 (16 |n| (r + |m - t|) + 3 |b t|): r has 13 (square, polynomial and product 5; two exponentials 4; four sums),
 * the rest is each operation's rounding. */
PW_INLINE vf gelu_tanh_lanes(vf t) { return gelu_tanh_gate_lanes(t, v_set1(1.0f)); }
PW_INLINE vf silu_lanes(vf t) { return times_logistic(t, t); }
PW_INLINE vf relu_lanes(vf t) { return v_max(v_zero(), t); } /* of a NaN the NaN */
PW_INLINE vf relu2_lanes(vf t) { return v_mul(relu_lanes(t), relu_lanes(t)); }

static const float XIELU_P[ERF_TERMS] = {0x1.0000000000000p-1f, 0x1.5555120000000p-3f,  0x1.5546f40000000p-5f,
                                         0x1.100bac0000000p-7f, 0x1.5b81080000000p-10f, 0x1.20b2360000000p-13f};

/* exp(m) - 1 - m for m <= 0 */
PW_INLINE vf exp_beyond_line(vf m) {
    vf end = v_set1(-1.0f), c = v_max(end, m), rest = v_sub(v_exp(v_min(end, m)), v_exp(end));
    return v_add(v_mul(v_mul(c, c), polynomial(XIELU_P, c)), v_add(rest, v_sub(c, m)));
}

PW_INLINE vf xielu_lanes(vf t, const float *own) {
    vf b = v_set1(own[2]), m = v_min(v_set1(own[3]), t);
    vf above = v_mul(t, v_fma(v_set1(own[0]), t, b));
    vf below = v_fma(v_set1(own[1]), v_add(exp_beyond_line(m), v_sub(m, t)), v_mul(b, t));
    vi sign = vi_shr(vi_or(v_bits(t), vi_sub(v_bits(t), vi_set1(1))), 31); /* 1 for t <= 0, both zeros too */
    vi chosen = vi_sub(vi_set1(0), sign);
    return vi_as_vf(vi_or(vi_and(chosen, v_bits(below)), vi_and(vi_sub(vi_set1(-1), chosen), v_bits(above))));
}

#define ACTIVATION(NAME)                                                                                       \
    void ISA(NAME)(int64_t n, const float *x, const float *own, float *y) {                                    \
        EACH_ELEMENT(n, y, NAME##_lanes(own ? v_add(LOAD(x + i), LOAD(own + i)) : LOAD(x + i)));               \
    }
PW_EACH_OF_SUMS(ACTIVATION)
void ISA(xielu)(int64_t n, const float *x, const float *own, float *y) { EACH_ELEMENT(n, y, xielu_lanes(LOAD(x + i), own)); }
