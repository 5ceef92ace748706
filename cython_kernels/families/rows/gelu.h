/* t / 2 (1 + erf(t / sqrt 2)), as activations.c bounds it; the gate of elementwise.c as well. */
enum { ERF_TERMS = 6 };
static const float ERF_P[ERF_TERMS] = {0x1.9884520000000p-1f, 0x1.16ef020000000p-4f, 0x1.32fa9a0000000p-7f,
                                       0x1.64a33a0000000p-12f, 0x1.a5fe460000000p-17f, 0x1.7c74ae0000000p-25f};
static const float ERF_Q[ERF_TERMS] = {0x1.0000000000000p+0f, 0x1.02106c0000000p-2f, 0x1.d6f4f00000000p-6f,
                                       0x1.eff6b60000000p-10f, 0x1.34ef960000000p-14f, 0x1.3b6f920000000p-20f};

PW_INLINE vf polynomial(const float *terms, vf x) {
    vf sum = v_set1(terms[ERF_TERMS - 1]);
    PW_UNROLL for (int i = ERF_TERMS - 2; i >= 0; --i) sum = v_fma(sum, x, v_set1(terms[i]));
    return sum;
}

PW_INLINE vf gelu_lanes(vf t) {
    vf x = v_max(v_set1(-5.625f), v_min(v_set1(5.625f), t)), square = v_mul(x, x);
    vf share = v_div(v_mul(x, polynomial(ERF_P, square)), polynomial(ERF_Q, square));
    vf erf = v_max(v_set1(-1.0f), v_min(v_set1(1.0f), v_mul(share, v_set1(1.0f + 0x1p-21f))));
    return v_mul(v_mul(t, v_set1(0.5f)), v_add(v_set1(1.0f), erf));
}
