/* Element by element, any length and alignment. add and scale round once.
 * silu_gate: g / (1 + exp(-g)) * u, relative error <= 6 * 2^-24 for g >= -87 (exp.h: 2; sum, quotient and product);
 * below that |result| <= 1e-35 * |u| where the true value is smaller still. */
static void ISA(add)(int64_t n, const float *y, float *x) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(x + i, v_add(v_load(x + i), v_load(y + i)));
    int rest = (int)(n - i);
    if (rest) v_store_n(x + i, v_add(v_load_n(x + i, rest), v_load_n(y + i, rest)), rest);
}

static void ISA(scale)(int64_t n, float factor, float *x) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(x + i, v_mul(v_load(x + i), v_set1(factor)));
    int rest = (int)(n - i);
    if (rest) v_store_n(x + i, v_mul(v_load_n(x + i, rest), v_set1(factor)), rest);
}

PW_INLINE vf silu_gate_lanes(vf gate, vf up) {
    vf below = v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), gate)));
    return v_mul(v_div(gate, below), up);
}

static void ISA(silu_gate)(int64_t n, const float *gate, const float *up, float *y) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(y + i, silu_gate_lanes(v_load(gate + i), v_load(up + i)));
    int rest = (int)(n - i);
    if (rest) v_store_n(y + i, silu_gate_lanes(v_load_n(gate + i, rest), v_load_n(up + i, rest)), rest);
}

static void ISA(exponential)(int64_t n, const float *x, float *y) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(y + i, v_exp(v_load(x + i)));
    int rest = (int)(n - i);
    if (rest) v_store_n(y + i, v_exp(v_load_n(x + i, rest)), rest);
}
