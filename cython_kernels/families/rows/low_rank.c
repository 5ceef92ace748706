/* y[row][c] += sum over j of x[row][j] W[c][j]: both products of an adapter, whose outputs or inputs are few.
 *
 * Each sum is one chain of multiply-adds in the order of j, from 0, and is added to y once: the same bits on every ISA, for
 * any rows and panels together. x is float32 and is not rounded. |sum - exact| <= gamma_rank sum |x_j W_cj|,
 * gamma_n = n u / (1 - n u), u = 2^-24 (Higham 2002, ch. 3); the addition rounds once more.
 *
 * A chain waits for itself: of one row four panels are computed at a time, of two rows two, else four rows of a panel. */
enum { THIN_ROWS = 4, THIN_STEP_BYTES = 64 }; /* of a panel: one input of float32, two of bf16 */

/* `tile` rows and panels: acc[(row * panels + panel) * PARTS_OF_SIXTEEN + part]. */
typedef struct {
    const pw_thin_weight *w;
    const pw_thin_rows *r;
    int64_t row, panel, steps;
} thin_tile;

PW_INLINE void thin_step(const thin_tile *t, int rows, int vectors, const vf *w, int64_t j, vf *acc) {
    PW_UNROLL for (int i = 0; i < rows; ++i) {
        vf factor = v_set1(t->r->x[(t->row + i) * t->r->ldx + j]);
        PW_UNROLL for (int v = 0; v < vectors; ++v) acc[i * vectors + v] = v_fma(factor, w[v], acc[i * vectors + v]);
    }
}

PW_INLINE void thin_sums(const thin_tile *t, int rows, int panels, int is_bf16, vf *acc) {
    const char *values = (const char *)t->w->values + t->panel * t->steps * THIN_STEP_BYTES;
    int vectors = panels * PARTS_OF_SIXTEEN;
    vf numbers[THIN_ROWS * PARTS_OF_SIXTEEN];
    vi words[THIN_ROWS * PARTS_OF_SIXTEEN];
    for (int64_t step = 0; step < t->steps; ++step, values += THIN_STEP_BYTES) {
        PW_UNROLL for (int v = 0; v < vectors; ++v) {
            int64_t panel = v / PARTS_OF_SIXTEEN, part = v % PARTS_OF_SIXTEEN;
            words[v] = vi_load(values + panel * t->steps * THIN_STEP_BYTES + part * LANES * 4);
            numbers[v] = vi_as_vf(is_bf16 ? vi_shl(words[v], 16) : words[v]);
        }
        thin_step(t, rows, vectors, numbers, is_bf16 ? 2 * step : step, acc);
        if (!is_bf16 || 2 * step + 1 == t->w->rank) continue;
        PW_UNROLL for (int v = 0; v < vectors; ++v) numbers[v] = vi_as_vf(vi_and(words[v], vi_set1((int32_t)0xFFFF0000)));
        thin_step(t, rows, vectors, numbers, 2 * step + 1, acc);
    }
}

PW_INLINE void add_thin(const thin_tile *t, int rows, int panels) {
    vf acc[THIN_ROWS * PARTS_OF_SIXTEEN];
    PW_UNROLL for (int i = 0; i < rows * panels * PARTS_OF_SIXTEEN; ++i) acc[i] = v_zero();
    if (t->w->is_bf16) thin_sums(t, rows, panels, 1, acc);
    else thin_sums(t, rows, panels, 0, acc);
    PW_UNROLL for (int i = 0; i < rows * panels; ++i) {
        int64_t column = (t->panel + i % panels) * SIXTEEN;
        float *y = t->r->y + t->r->row_at[t->row + i / panels] * t->r->ldy + column;
        PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part, y += LANES) {
            vf sum = acc[i * PARTS_OF_SIXTEEN + part];
            int count = of_part(t->w->n - column, part);
            if (count == LANES) v_store(y, v_add(v_load(y), sum));
            else if (count) v_store_n(y, v_add(v_load_n(y, count), sum), count);
        }
    }
}

void ISA(add_low_rank)(const pw_thin_weight *w, int64_t first, int64_t end, const pw_thin_rows *rows) {
    thin_tile t = {w, rows, 0, 0, w->is_bf16 ? (w->rank + 1) / 2 : w->rank};
    for (int64_t left; (left = rows->count - t.row) > 0; t.row += THIN_ROWS)
        for (t.panel = first; t.panel < end;) {
            if (left == 1 && end - t.panel >= 4) add_thin(&t, 1, 4), t.panel += 4;
            else if (left == 1 && end - t.panel >= 2) add_thin(&t, 1, 2), t.panel += 2;
            else if (left == 1) add_thin(&t, 1, 1), t.panel += 1;
            else if (left == 2 && end - t.panel >= 2) add_thin(&t, 2, 2), t.panel += 2;
            else if (left == 2) add_thin(&t, 2, 1), t.panel += 1;
            else if (left == 3) add_thin(&t, 3, 1), t.panel += 1;
            else add_thin(&t, 4, 1), t.panel += 1;
        }
}
