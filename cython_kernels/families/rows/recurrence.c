/* Layers with a state: short convolutions over a row's predecessors, and linear recurrences with a matrix of each head.
 *
 * convolve: y = act(bias + sum_j w_j x_j) gate: a chain of fma over the taps, the oldest row first, for every element. Relative to
 * the sum of magnitudes: error <= (taps + 1) * 2^-24, and 6 * 2^-24 more of the activation.
 *
 * recur: for every element j of a value, over rows of one sequence in order, S[i][j] being kept between them:
 *     decayed   T = a S                    (rounded)
 *     change    d = b (v_j - sum_i k_i T)  where the rule erases, else b v_j
 *     new       S = fma(k_i, d, T)
 *     read      o = sum_i q_i S            then fma(skip, v_j, o) where there is a skip
 * Sums over i are four chains of fma, i mod 4, added (0 + 1) + (2 + 3). Elements j do not mix, so that the bits are the same for
 * every width of vectors. One step's relative error against the state's magnitude: (key_dim / 4 + 6) * 2^-24. */
#define CONVOLVE(i, LOAD, STORE)                                                    \
    do {                                                                            \
        vf sum = c->bias ? LOAD(c->bias + (i)) : v_zero();                          \
        for (int t = 0; t < c->taps; ++t)                                           \
            sum = v_fma(LOAD(c->weights + t * c->weights_stride + (i)), LOAD(c->rows[t] + (i)), sum); \
        if (c->silu) sum = silu_lanes(sum);                                         \
        if (c->gate) sum = v_mul(sum, LOAD(c->gate + (i)));                         \
        STORE(c->y + (i), sum);                                                     \
    } while (0)

void ISA(convolve)(int64_t n, const pw_convolution *c) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) CONVOLVE(i, v_load, v_store);
    int rest = (int)(n - i);
    if (!rest) return;
#define LOAD_REST(p) v_load_n(p, rest)
#define STORE_REST(p, v) v_store_n(p, v, rest)
    CONVOLVE(i, LOAD_REST, STORE_REST);
#undef LOAD_REST
#undef STORE_REST
}

/* y[n] *= x[n] */
void ISA(multiply)(int64_t n, const float *x, float *y) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(y + i, v_mul(v_load(y + i), v_load(x + i)));
    int rest = (int)(n - i);
    if (rest) v_store_n(y + i, v_mul(v_load_n(y + i, rest), v_load_n(x + i, rest)), rest);
}

typedef struct {
    sixteen chain[4];
} four_chains;

PW_INLINE sixteen of_four(const four_chains *sums) {
    return add_sixteen(add_sixteen(sums->chain[0], sums->chain[1]), add_sixteen(sums->chain[2], sums->chain[3]));
}

PW_INLINE four_chains no_chains(void) {
    four_chains sums;
    PW_UNROLL for (int c = 0; c < 4; ++c) sums.chain[c] = no_sums();
    return sums;
}

/* S = a S, and its sum with the key. */
PW_INLINE sixteen decay_and_read(const pw_recurrence *r, const float *key, float decay) {
    four_chains sums = no_chains();
    vf a = v_set1(decay);
    int32_t whole = r->key_dim / 4 * 4;
    for (int32_t i = 0; i < r->key_dim; i += 4) {
        int32_t chains = i < whole ? 4 : r->key_dim - i;
        PW_UNROLL for (int c = 0; c < 4; ++c) {
            if (c >= chains) break;
            float *row = r->state + (i + c) * SIXTEEN;
            vf k = v_set1(key[i + c]);
            PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
                vf s = v_mul(v_load(row + p * LANES), a);
                v_store(row + p * LANES, s);
                sums.chain[c].part[p] = v_fma(k, s, sums.chain[c].part[p]);
            }
        }
    }
    return of_four(&sums);
}

/* S = fma(k, d, decay S), decay 1 where it has been applied; the sum of the new S with the query. */
PW_INLINE sixteen change_and_read(const pw_recurrence *r, const float *key, const float *query, const sixteen *change,
                                  float decay, bool decays) {
    four_chains sums = no_chains();
    vf a = v_set1(decay);
    int32_t whole = r->key_dim / 4 * 4;
    for (int32_t i = 0; i < r->key_dim; i += 4) {
        int32_t chains = i < whole ? 4 : r->key_dim - i;
        PW_UNROLL for (int c = 0; c < 4; ++c) {
            if (c >= chains) break;
            float *row = r->state + (i + c) * SIXTEEN;
            vf k = v_set1(key[i + c]), q = v_set1(query[i + c]);
            PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
                vf s = v_load(row + p * LANES);
                if (decays) s = v_mul(s, a);
                s = v_fma(k, change->part[p], s);
                v_store(row + p * LANES, s);
                sums.chain[c].part[p] = v_fma(q, s, sums.chain[c].part[p]);
            }
        }
    }
    return of_four(&sums);
}

void ISA(recur)(const pw_recurrence *r) {
    for (int64_t row = 0; row < r->n_rows; ++row) {
        const float *key = r->key + row * r->stride, *query = r->query + row * r->stride;
        const float *value = r->value + row * r->stride, *gates = r->gates + row * r->gates_stride;
        float decay = gates[0], *out = r->out + row * r->out_stride;
        vf b = v_set1(gates[r->factor_at]);
        sixteen change, v, kept = no_sums();
        if (r->erases) kept = decay_and_read(r, key, decay);
        PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
            v.part[p] = v_load_n(value + p * LANES, of_part(r->columns, p));
            vf d = r->erases ? v_sub(v.part[p], kept.part[p]) : v.part[p];
            change.part[p] = v_mul(d, b);
        }
        sixteen read = r->erases ? change_and_read(r, key, query, &change, 1.0f, false)
                                 : change_and_read(r, key, query, &change, decay, true);
        PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
            vf o = r->skip != 0.0f ? v_fma(v_set1(r->skip), v.part[p], read.part[p]) : read.part[p];
            v_store_n(out + p * LANES, o, of_part(r->columns, p));
        }
    }
}
