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
 * a may be of each i (decays). Sums over i are four chains of fma, i mod 4, added (0 + 1) + (2 + 3). Elements j do not mix, so that
 * the bits are the same for every width of vectors. One step's relative error against the state's magnitude:
 * (key_dim / 4 + 6) * 2^-24.
 *
 * A state passes through registers once for several rows, which changes no operation: TOGETHER of them where nothing is erased;
 * else a row's change and the decay of the next one. */
PW_INLINE vf convolved(const pw_convolution *c, int64_t i, int count) {
    vf sum = c->bias ? LOAD(c->bias + i) : v_zero();
    for (int t = 0; t < c->taps; ++t) sum = v_fma(LOAD(c->weights + t * c->weights_stride + i), LOAD(c->rows[t] + i), sum);
    if (c->silu) sum = silu_lanes(sum);
    return c->gate ? v_mul(sum, LOAD(c->gate + i)) : sum;
}

void ISA(convolve)(int64_t n, const pw_convolution *c) { EACH_ELEMENT(n, c->y, convolved(c, i, count)); }

/* y[n] *= x[n] */
void ISA(multiply)(int64_t n, const float *x, float *y) { EACH_ELEMENT(n, y, v_mul(LOAD(y + i), LOAD(x + i))); }

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

/* The decay of element i of a key. */
PW_INLINE vf decay_of(const float *gates, const float *decays, int32_t i) { return v_set1(decays ? decays[i] : gates[0]); }

/* S = a S, and its sum with the key; or with a change d, S = fma(k, d, S) and its sum with the query. */
PW_INLINE sixteen pass(const pw_recurrence *r, const float *key, const float *gates, const float *decays, const float *query,
                       const sixteen *change) {
    four_chains sums = no_chains();
    int32_t whole = r->key_dim / 4 * 4;
    for (int32_t i = 0; i < r->key_dim; i += 4) {
        int32_t chains = i < whole ? 4 : r->key_dim - i;
        PW_UNROLL for (int c = 0; c < 4; ++c) {
            if (c >= chains) break;
            float *row = r->state + (i + c) * SIXTEEN;
            vf k = v_set1(key[i + c]), by = change ? v_set1(query[i + c]) : decay_of(gates, decays, i + c);
            PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
                vf s = v_load(row + p * LANES);
                s = change ? v_fma(k, change->part[p], s) : v_mul(s, by);
                v_store(row + p * LANES, s);
                sums.chain[c].part[p] = v_fma(change ? by : k, s, sums.chain[c].part[p]);
            }
        }
    }
    return of_four(&sums);
}

/* The change, and then S = a S with the decay of the next row, and its sum with that row's key. Part by part of sixteen: each
 * has eight chains. */
PW_INLINE sixteen change_and_decay(const pw_recurrence *r, const float *key, const float *query, const sixteen *change,
                                   const float *next_key, const float *gates, const float *decays, sixteen *kept) {
    sixteen read;
    int32_t whole = r->key_dim / 4 * 4;
    PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
        vf reads[4], keeps[4];
        PW_UNROLL for (int c = 0; c < 4; ++c) reads[c] = keeps[c] = v_zero();
        for (int32_t i = 0; i < r->key_dim; i += 4) {
            int32_t chains = i < whole ? 4 : r->key_dim - i;
            PW_UNROLL for (int c = 0; c < 4; ++c) {
                if (c >= chains) break;
                float *at = r->state + (i + c) * SIXTEEN + p * LANES;
                vf s = v_fma(v_set1(key[i + c]), change->part[p], v_load(at));
                reads[c] = v_fma(v_set1(query[i + c]), s, reads[c]);
                s = v_mul(s, decay_of(gates, decays, i + c));
                v_store(at, s);
                keeps[c] = v_fma(v_set1(next_key[i + c]), s, keeps[c]);
            }
        }
        read.part[p] = v_add(v_add(reads[0], reads[1]), v_add(reads[2], reads[3]));
        kept->part[p] = v_add(v_add(keeps[0], keeps[1]), v_add(keeps[2], keeps[3]));
    }
    return read;
}

PW_INLINE sixteen value_of(const pw_recurrence *r, int64_t row) {
    const float *value = r->value + row * r->stride;
    sixteen v;
    PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) v.part[p] = v_load_n(value + p * LANES, of_part(r->columns, p));
    return v;
}

PW_INLINE void write_read(const pw_recurrence *r, int64_t row, sixteen value, sixteen read) {
    float *out = r->out + row * r->out_stride;
    PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
        vf o = r->skip != 0.0f ? v_fma(v_set1(r->skip), value.part[p], read.part[p]) : read.part[p];
        v_store_n(out + p * LANES, o, of_part(r->columns, p));
    }
}

/* All rows, what a key reads being taken from each value. */
PW_INLINE void recur_erasing(const pw_recurrence *r, bool by_key) {
    const float *decays = by_key ? r->decays : NULL;
    sixteen kept = no_sums();
    if (r->n_rows > 0) kept = pass(r, r->key, r->gates, decays, NULL, NULL);
    for (int64_t row = 0; row < r->n_rows; ++row) {
        const float *key = r->key + row * r->stride, *query = r->query + row * r->stride;
        vf b = v_set1(r->gates[row * r->gates_stride + r->factor_at]);
        sixteen v = value_of(r, row), change, read;
        PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) change.part[p] = v_mul(v_sub(v.part[p], kept.part[p]), b);
        if (row + 1 < r->n_rows) {
            int64_t next = (row + 1) * r->gates_stride;
            read = change_and_decay(r, key, query, &change, key + r->stride, r->gates + next, by_key ? decays + next : NULL,
                                    &kept);
        } else {
            read = pass(r, key, NULL, NULL, query, &change);
        }
        write_read(r, row, v, read);
    }
}

/* Rows whose changes know nothing of the state, which passes once for all of them: as many as leave their four chains each in
 * registers. */
enum { TOGETHER = LANES == 8 ? 2 : 4 };

PW_INLINE void recur_adding(const pw_recurrence *r, int64_t first, int together) {
    sixteen values[TOGETHER], reads[TOGETHER];
    int32_t whole = r->key_dim / 4 * 4;
    PW_UNROLL for (int t = 0; t < together; ++t) values[t] = value_of(r, first + t);
    PW_UNROLL for (int p = 0; p < PARTS_OF_SIXTEEN; ++p) {
        vf changes[TOGETHER], decays[TOGETHER], chains[TOGETHER][4];
        PW_UNROLL for (int t = 0; t < together; ++t) {
            const float *gates = r->gates + (first + t) * r->gates_stride;
            decays[t] = v_set1(gates[0]);
            changes[t] = v_mul(values[t].part[p], v_set1(gates[r->factor_at]));
            PW_UNROLL for (int c = 0; c < 4; ++c) chains[t][c] = v_zero();
        }
        for (int32_t i = 0; i < r->key_dim; i += 4) {
            int32_t count = i < whole ? 4 : r->key_dim - i;
            PW_UNROLL for (int c = 0; c < 4; ++c) {
                if (c >= count) break;
                float *at = r->state + (i + c) * SIXTEEN + p * LANES;
                vf s = v_load(at);
                PW_UNROLL for (int t = 0; t < together; ++t) {
                    int64_t of_row = (first + t) * r->stride + i + c;
                    s = v_fma(v_set1(r->key[of_row]), changes[t], v_mul(s, decays[t]));
                    chains[t][c] = v_fma(v_set1(r->query[of_row]), s, chains[t][c]);
                }
                v_store(at, s);
            }
        }
        PW_UNROLL for (int t = 0; t < together; ++t)
            reads[t].part[p] = v_add(v_add(chains[t][0], chains[t][1]), v_add(chains[t][2], chains[t][3]));
    }
    PW_UNROLL for (int t = 0; t < together; ++t) write_read(r, first + t, values[t], reads[t]);
}

void ISA(recur)(const pw_recurrence *r) {
    if (r->erases && r->decays) {
        recur_erasing(r, true);
    } else if (r->erases) {
        recur_erasing(r, false);
    } else {
        int64_t row = 0;
        for (; row + TOGETHER <= r->n_rows; row += TOGETHER) recur_adding(r, row, TOGETHER);
        for (; row < r->n_rows; ++row) recur_adding(r, row, 1);
    }
}
