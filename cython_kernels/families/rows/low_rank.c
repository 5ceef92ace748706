/* y[row][c] += sum over j of x[row][j] W[c][j]: the second product of an adapter, whose inputs are few.
 *
 * Each sum is one chain of multiply-adds in the order of j, from 0, and is added to y once: the same bits on every ISA, for
 * any rows and panels together. |sum - exact| <= gamma_rank sum |x_j W_cj|, gamma_n = n u / (1 - n u), u = 2^-24 (Higham 2002,
 * ch. 3); the addition rounds once more. */
enum { THIN_ROWS = 4, THIN_STEP_BYTES = 64 }; /* of a panel: one input of float32, two of bf16 */

PW_INLINE void thin_step(vf *acc, const vf *w, const pw_thin_rows *r, int64_t row, int rows, int64_t j) {
    PW_UNROLL for (int i = 0; i < rows; ++i) {
        vf factor = v_set1(r->x[(row + i) * r->ldx + j]);
        PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
            acc[i * PARTS_OF_SIXTEEN + part] = v_fma(factor, w[part], acc[i * PARTS_OF_SIXTEEN + part]);
        }
    }
}

PW_INLINE void thin_sums(const pw_thin_weight *w, int64_t panel, const pw_thin_rows *r, int64_t row, int rows, vf *acc) {
    int64_t steps = w->is_bf16 ? (w->rank + 1) / 2 : w->rank;
    const char *values = (const char *)w->values + panel * steps * THIN_STEP_BYTES;
    vf numbers[PARTS_OF_SIXTEEN];
    vi words[PARTS_OF_SIXTEEN];
    for (int64_t step = 0; step < steps; ++step, values += THIN_STEP_BYTES) {
        PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
            words[part] = vi_load(values + part * LANES * 4);
            numbers[part] = vi_as_vf(w->is_bf16 ? vi_shl(words[part], 16) : words[part]);
        }
        thin_step(acc, numbers, r, row, rows, w->is_bf16 ? 2 * step : step);
        if (!w->is_bf16 || 2 * step + 1 == w->rank) continue;
        PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
            numbers[part] = vi_as_vf(vi_and(words[part], vi_set1((int32_t)0xFFFF0000)));
        }
        thin_step(acc, numbers, r, row, rows, 2 * step + 1);
    }
}

PW_INLINE void add_thin(const pw_thin_weight *w, int64_t panel, const pw_thin_rows *r, int64_t row, int rows) {
    vf acc[THIN_ROWS * PARTS_OF_SIXTEEN];
    PW_UNROLL for (int i = 0; i < rows * PARTS_OF_SIXTEEN; ++i) acc[i] = v_zero();
    thin_sums(w, panel, r, row, rows, acc);
    PW_UNROLL for (int i = 0; i < rows; ++i) {
        float *y = r->y + r->row_at[row + i] * r->ldy + panel * SIXTEEN;
        PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part, y += LANES) {
            vf sum = acc[i * PARTS_OF_SIXTEEN + part];
            int count = of_part(w->n - panel * SIXTEEN, part);
            if (count == LANES) v_store(y, v_add(v_load(y), sum));
            else if (count) v_store_n(y, v_add(v_load_n(y, count), sum), count);
        }
    }
}

void ISA(add_low_rank)(const pw_thin_weight *w, int64_t first, int64_t end, const pw_thin_rows *rows) {
    for (int64_t row = 0; row < rows->count; row += THIN_ROWS)
        for (int64_t panel = first; panel < end; ++panel) switch (rows->count - row) {
            case 1: add_thin(w, panel, rows, row, 1); break;
            case 2: add_thin(w, panel, rows, row, 2); break;
            case 3: add_thin(w, panel, rows, row, 3); break;
            default: add_thin(w, panel, rows, row, 4);
            }
}
