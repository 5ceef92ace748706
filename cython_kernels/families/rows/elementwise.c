/* Element by element. add, sum and scale round once for each operation.
 * silu_gate: g / (1 + exp(-g)) * u, relative error <= 6 * 2^-24 for g >= -87 (exp.h: 2; sum; quotient; product); below
 * that |result| <= 1e-35 * |u| where the true value is smaller still. */
void ISA(add)(int64_t n, const float *y, float *x) {
    EACH_ELEMENT(n, x, v_add(LOAD(x + i), LOAD(y + i)));
}

PW_INLINE vf sum_lanes(int n_parts, const float *const *parts, int64_t i, int count) {
    vf v = LOAD(parts[0] + i);
    for (int p = 1; p < n_parts; ++p) v = v_add(v, LOAD(parts[p] + i));
    return v;
}

void ISA(sum)(int n_parts, const float *const *parts, int64_t n, float *out) {
    EACH_ELEMENT(n, out, sum_lanes(n_parts, parts, i, count));
}

void ISA(scale)(int64_t n, float factor, float *x) {
    EACH_ELEMENT(n, x, v_mul(LOAD(x + i), v_set1(factor)));
}

/* x / (1 + exp(-z)) */
PW_INLINE vf times_logistic(vf x, vf z) {
    return v_div(x, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), z))));
}

PW_INLINE vf silu_gate_lanes(vf gate, vf up) { return v_mul(times_logistic(gate, gate), up); }

/* x / 2 (1 + tanh(u)) is x logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). */
PW_INLINE vf gelu_tanh_gate_lanes(vf gate, vf up) {
    vf cubic = v_mul(v_mul(gate, gate), v_set1(1.5957691216f * 0.044715f));
    vf z = v_mul(gate, v_add(cubic, v_set1(1.5957691216f)));
    return v_mul(times_logistic(gate, z), up);
}

/* The gelu of activations.c, times up. */
PW_INLINE vf gelu_gate_lanes(vf gate, vf up) { return v_mul(gelu_lanes(gate), up); }

/* gpt-oss: gate at most 7, up within 7, (up + 1) gate logistic(1.702 gate). */
PW_INLINE vf clamped_silu_gate_lanes(vf gate, vf up) {
    vf limit = v_set1(7.0f), below = v_min(limit, gate);
    vf within = v_max(v_set1(-7.0f), v_min(limit, up));
    return v_mul(times_logistic(below, v_mul(below, v_set1(1.702f))), v_add(within, v_set1(1.0f)));
}

/* up / (1 + exp(-gate)) */
PW_INLINE vf logistic_gate_lanes(vf gate, vf up) { return times_logistic(up, gate); }

#define GATE(NAME)                                                                   \
    void ISA(NAME##_gate)(int64_t n, const float *gate, const float *up, float *y) { \
        EACH_ELEMENT(n, y, NAME##_gate_lanes(LOAD(gate + i), LOAD(up + i)));         \
    }
PW_EACH_GATE(GATE)

/* c - 2 c / (exp(2 x / c) + 1): absolute error <= 4 * 2^-24 * c. */
PW_INLINE vf cap_lanes(vf x, vf twice_inverse, vf c) {
    vf e = v_exp(v_mul(x, twice_inverse));
    return v_sub(c, v_div(v_add(c, c), v_add(e, v_set1(1.0f))));
}

void ISA(cap)(int64_t n, float c, const float *x, float *y) {
    vf twice_inverse = v_set1(2.0f / c), all = v_set1(c);
    EACH_ELEMENT(n, y, cap_lanes(LOAD(x + i), twice_inverse, all));
}

void ISA(add_scaled)(int64_t n, float factor, const float *x, float *y) {
    EACH_ELEMENT(n, y, v_fma(v_set1(factor), LOAD(x + i), LOAD(y + i)));
}

void ISA(exponential)(int64_t n, const float *x, float *y) {
    EACH_ELEMENT(n, y, v_exp(LOAD(x + i)));
}
