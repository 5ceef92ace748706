/* Reductions over a row of logits: maximum, softmax, log-sum-exp, argmax, the k largest.
 *
 * Sums: sixteen of floats over blocks of SUM_BLOCK values, blocks added in double, so the relative error of a sum of
 * exponentials is <= (SUM_BLOCK / 16 + 16 + 3) * 2^-24 plus the exponent's own |x - max| * 2^-24, whatever n is.
 * NaN is skipped by maximum and top_k, makes the sums NaN, and is what argmax finds where there is one. */
enum { SUM_BLOCK = 1024, SCAN_BLOCK = 64 };

static float row_maximum(int64_t n, const float *x) {
    vf top = v_set1(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) top = v_max(v_load(x + i), top); /* `top` survives a NaN in x */
    float maximum = v_max_all(top);
    for (; i < n; ++i) maximum = x[i] > maximum ? x[i] : maximum;
    return maximum;
}

/* sum(exp(x - shift)); stores the exponentials when y is given. */
static double sum_exponentials(int64_t n, const float *x, float shift, float *y) {
    double total = 0.0;
    vf s = v_set1(shift);
    for (int64_t start = 0; start < n; start += SUM_BLOCK) {
        int64_t end = start + SUM_BLOCK < n ? start + SUM_BLOCK : n, i = start;
        sixteen sum = no_sums();
        for (; i + SIXTEEN <= end; i += SIXTEEN)
            PW_UNROLL for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
                vf e = v_exp(v_sub(v_load(x + i + part * LANES), s));
                if (y) v_store(y + i + part * LANES, e);
                sum.part[part] = v_add(sum.part[part], e);
            }
        for (int part = 0; part < PARTS_OF_SIXTEEN; ++part) {
            int rest = of_part(end - i, part);
            if (!rest) continue;
            vf e = v_exp(v_sub(v_load_n(x + i + part * LANES, rest), s));
            if (y) v_store_n(y + i + part * LANES, e, rest);
            sum.part[part] = v_add(sum.part[part], v_first(e, rest, 0.0f));
        }
        total += (double)sum_of_sixteen(sum);
    }
    return total;
}

void ISA(softmax)(int64_t n, const float *x, float *y) {
    double total = sum_exponentials(n, x, row_maximum(n, x), y);
    ISA(scale)(n, (float)(1.0 / total), y);
}

double ISA(logsumexp)(int64_t n, const float *x) {
    float top = row_maximum(n, x);
    if (isinf(top)) return (double)top;
    return (double)top + log(sum_exponentials(n, x, top, NULL));
}

/* Index of the first NaN, or n. Zero times anything finite is zero, so most blocks need no second look. */
static int64_t first_nan(int64_t n, const float *x) {
    vf poison = v_zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) poison = v_fma(v_load(x + i), v_zero(), poison);
    if (v_sum(poison) == 0.0f && i == n) return n;
    for (i = 0; i < n && !isnan(x[i]); ++i) {}
    return i;
}

/* The first NaN, else the first of the largest. One pass over memory: a block is searched while L1 holds it. */
int64_t ISA(argmax)(int64_t n, const float *x) {
    float top = -INFINITY;
    int64_t top_start = 0;
    for (int64_t start = 0; start < n; start += SUM_BLOCK) {
        int64_t length = n - start < SUM_BLOCK ? n - start : SUM_BLOCK, nan = first_nan(length, x + start);
        if (nan < length) return start + nan;
        float maximum = row_maximum(length, x + start);
        if (maximum > top) top = maximum, top_start = start;
    }
    int64_t i = top_start;
    while (x[i] != top) ++i;
    return i;
}

/* ---- the k largest: a heap whose root is the worst kept; equal values prefer the lower index --------------------- */

static int is_worse(float a, int64_t a_index, float b, int64_t b_index) {
    return a < b || (a == b && a_index > b_index);
}

static void sink(int64_t size, float *heap, int64_t *index, float value, int64_t at) {
    int64_t hole = 0;
    for (int64_t child = 1; child < size; child = 2 * hole + 1) {
        if (child + 1 < size && is_worse(heap[child + 1], index[child + 1], heap[child], index[child])) ++child;
        if (!is_worse(heap[child], index[child], value, at)) break;
        heap[hole] = heap[child];
        index[hole] = index[child];
        hole = child;
    }
    heap[hole] = value;
    index[hole] = at;
}

static void rise(int64_t hole, float *heap, int64_t *index, float value, int64_t at) {
    for (; hole > 0; hole = (hole - 1) / 2) {
        int64_t parent = (hole - 1) / 2;
        if (!is_worse(value, at, heap[parent], index[parent])) break;
        heap[hole] = heap[parent];
        index[hole] = index[parent];
    }
    heap[hole] = value;
    index[hole] = at;
}

int64_t ISA(top_k)(int64_t n, const float *x, int64_t k, float *heap, int64_t *index) {
    if (k > n) k = n;
    if (k <= 0) return 0;
    int64_t i = 0;
    for (; i < k; ++i) rise(i, heap, index, isnan(x[i]) ? -INFINITY : x[i], i);
    while (i < n) {
        int64_t end = i + SCAN_BLOCK < n ? i + SCAN_BLOCK : n;
        if (row_maximum(end - i, x + i) > heap[0])
            for (int64_t j = i; j < end; ++j)
                if (x[j] > heap[0]) sink(k, heap, index, x[j], j);
        i = end;
    }
    for (int64_t size = k - 1; size > 0; --size) { /* the worst goes last */
        float value = heap[size];
        int64_t at = index[size], worst = index[0];
        float worst_value = heap[0];
        sink(size, heap, index, value, at);
        heap[size] = worst_value;
        index[size] = worst;
    }
    return k;
}
