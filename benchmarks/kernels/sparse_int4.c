/* Prototype: one row times int4 weights in symmetric groups of 32, dense and with a bitmap. Run by ../sparse_int4.py.
 *
 *     sparse_int4 K SHARE_OF_ZEROS POOL_MIB CALLS
 *
 * Panels of 16 outputs; a vector row is 64 weights, 16 outputs times 4 inputs, as in gemm.h. Two vector rows share bytes:
 * the first has the low nibbles, the second the high ones. Dense they take 64 bytes. Sparse they take two masks of 64
 * bits and as many bytes as the row of the two that keeps more; one instruction moves the kept nibbles to their places
 * and leaves 8, which means zero, elsewhere. So both have the same integers, hence the same bits. A group has 16 scales
 * of 16 bits. It prints: 1 if both results are equal in every bit, bits a weight dense and sparse, nanoseconds for 64
 * weights dense and sparse with weights from memory, then of TILE panels that stay in the caches. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LANES = 16, GROUP = 32, PAIRS = GROUP / 8, SLACK = 4096, AHEAD = 1024, TILE = 4 };

typedef struct {
    uint8_t *dense, *sparse;
    size_t dense_bytes, sparse_bytes;
} packed; /* of one panel */

static uint64_t state = 88172645463325252u;

static double drawn(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) / 9007199254740992.0;
}

/* Panels in both forms; what is 8 in the dense one has no bit. */
static packed pack(int64_t groups, double zeros) {
    packed p = {0};
    p.dense = aligned_alloc(64, groups * (64 * PAIRS + 2 * LANES) + SLACK);
    p.sparse = malloc(groups * (80 * PAIRS + 2 * LANES) + SLACK);
    uint8_t *d = p.dense, *s = p.sparse;
    for (int64_t g = 0; g < groups; ++g) {
        uint16_t scales[LANES];
        for (int i = 0; i < LANES; ++i) scales[i] = (uint16_t)(0x3c00 + (int)(drawn() * 0x400)); /* float16, 1 to 2 */
        memcpy(d, scales, sizeof scales), memcpy(s, scales, sizeof scales);
        d += sizeof scales, s += sizeof scales;
        for (int pair = 0; pair < PAIRS; ++pair) {
            uint64_t masks[2] = {0, 0};
            int kept[2] = {0, 0};
            uint8_t rows[2][64], bytes[64] = {0};
            for (int row = 0; row < 2; ++row)
                for (int i = 0; i < 64; ++i) {
                    int value = (int)(drawn() * 15.0), dropped = drawn() < zeros;
                    rows[row][i] = (uint8_t)(dropped ? 8 : value + (value >= 8));
                    if (dropped) continue;
                    masks[row] |= (uint64_t)1 << i;
                    bytes[kept[row]++] |= (uint8_t)(rows[row][i] << 4 * row);
                }
            for (int i = 0; i < 64; ++i) d[i] = (uint8_t)(rows[0][i] | rows[1][i] << 4);
            d += 64;
            int longer = kept[0] > kept[1] ? kept[0] : kept[1];
            memcpy(s, masks, 16), memcpy(s + 16, bytes, (size_t)longer);
            s += 16 + longer;
        }
    }
    p.dense_bytes = (size_t)(d - p.dense), p.sparse_bytes = (size_t)(s - p.sparse);
    memset(s, 0, 128);
    return p;
}

static __m512 scales_of(const uint8_t *w) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w)); }

static __m512i four_inputs(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

#define EACH(p) _Pragma("GCC unroll 4") for (int p = 0; p < TILE; ++p)

/* TILE panels at once, each from a stream of its own: alone, a row waits for the number of bytes of the row before. */
static __m512 dense_panels(const uint8_t *const *panels, int64_t groups, const int8_t *x, const int32_t *bases) {
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t *w[TILE];
    __m512 y[TILE];
    for (int p = 0; p < TILE; ++p) w[p] = panels[p], y[p] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, x += GROUP) {
        __m512i sum[TILE];
        __m512 scale[TILE];
        EACH(p) sum[p] = _mm512_set1_epi32(bases[g]), scale[p] = scales_of(w[p]), w[p] += 2 * LANES;
        for (int pair = 0; pair < PAIRS; ++pair) {
            __m512i a = four_inputs(x + 8 * pair), b = four_inputs(x + 8 * pair + 4);
            EACH(p) {
                __m512i both = _mm512_loadu_si512(w[p]);
                _mm_prefetch((const char *)w[p] + AHEAD, _MM_HINT_T0);
                sum[p] = _mm512_dpbusd_epi32(sum[p], _mm512_and_si512(both, low), a);
                sum[p] = _mm512_dpbusd_epi32(sum[p], _mm512_and_si512(_mm512_srli_epi16(both, 4), low), b);
                w[p] += 64;
            }
        }
        EACH(p) y[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p]), scale[p], y[p]);
    }
    return _mm512_add_ps(_mm512_add_ps(y[0], y[1]), _mm512_add_ps(y[2], y[3]));
}

static __m512 sparse_panels(const uint8_t *const *panels, int64_t groups, const int8_t *x, const int32_t *bases) {
    const __m512i low = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(8);
    const uint8_t *w[TILE];
    __m512 y[TILE];
    for (int p = 0; p < TILE; ++p) w[p] = panels[p], y[p] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, x += GROUP) {
        __m512i sum[TILE];
        __m512 scale[TILE];
        EACH(p) sum[p] = _mm512_set1_epi32(bases[g]), scale[p] = scales_of(w[p]), w[p] += 2 * LANES;
        for (int pair = 0; pair < PAIRS; ++pair) {
            __m512i a = four_inputs(x + 8 * pair), b = four_inputs(x + 8 * pair + 4);
            EACH(p) {
                uint64_t first, second;
                memcpy(&first, w[p], 8), memcpy(&second, w[p] + 8, 8);
                __m512i both = _mm512_loadu_si512(w[p] + 16);
                _mm_prefetch((const char *)w[p] + AHEAD, _MM_HINT_T0);
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                __m512i v = _mm512_mask_expand_epi8(zero, first, _mm512_and_si512(both, low));
                __m512i u = _mm512_mask_expand_epi8(zero, second, high);
                sum[p] = _mm512_dpbusd_epi32(sum[p], v, a);
                sum[p] = _mm512_dpbusd_epi32(sum[p], u, b);
                int64_t n = __builtin_popcountll(first), m = __builtin_popcountll(second);
                w[p] += 16 + (n > m ? n : m);
            }
        }
        EACH(p) y[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p]), scale[p], y[p]);
    }
    return _mm512_add_ps(_mm512_add_ps(y[0], y[1]), _mm512_add_ps(y[2], y[3]));
}

typedef __m512 product(const uint8_t *const *, int64_t, const int8_t *, const int32_t *);

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* Nanoseconds for 64 weights: the least of `calls`, each over all panels of the pool. */
static double timed(product *multiply, const uint8_t *pool, size_t bytes, int64_t n, int64_t groups, const int8_t *x,
                    const int32_t *bases, int calls) {
    double best = 1e300;
    volatile float kept = 0;
    for (int call = 0; call < calls; ++call) {
        __m512 y = _mm512_setzero_ps();
        double began = now_ns();
        for (int64_t i = 0; i < n; i += TILE) {
            const uint8_t *panels[TILE];
            for (int p = 0; p < TILE; ++p) panels[p] = pool + (size_t)(i + p) * bytes;
            y = _mm512_add_ps(y, multiply(panels, groups, x, bases));
        }
        double ns = (now_ns() - began) / (double)(n * groups * (GROUP * LANES / 64));
        kept = kept + _mm512_reduce_add_ps(y);
        if (ns < best) best = ns;
    }
    return best;
}

static uint8_t *copies(const uint8_t *panel, size_t bytes, int64_t n) {
    uint8_t *pool = aligned_alloc(64, ((size_t)n * bytes + SLACK + 63) / 64 * 64);
    for (int64_t i = 0; i < n; ++i) memcpy(pool + (size_t)i * bytes, panel, bytes);
    memset(pool + (size_t)n * bytes, 0, SLACK);
    return pool;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    unsigned groups = (unsigned)atoi(argv[1]) / GROUP;
    double zeros = atof(argv[2]);
    size_t pool_bytes = (size_t)atol(argv[3]) << 20;
    int calls = atoi(argv[4]);
    packed p = pack(groups, zeros);
    int8_t *x = malloc((size_t)groups * GROUP);
    int32_t *bases = malloc(sizeof(int32_t) * (size_t)groups);
    for (unsigned g = 0; g < groups; ++g) {
        bases[g] = 0;
        for (int i = 0; i < GROUP; ++i) bases[g] -= 8 * (x[g * GROUP + i] = (int8_t)(drawn() * 254 - 127));
    }
    const uint8_t *d[TILE] = {p.dense, p.dense, p.dense, p.dense}, *s[TILE] = {p.sparse, p.sparse, p.sparse, p.sparse};
    __m512 dense = dense_panels(d, groups, x, bases), sparse = sparse_panels(s, groups, x, bases);
    double weights = (double)groups * GROUP * LANES;
    printf("%d %.4f %.4f", memcmp(&dense, &sparse, sizeof dense) == 0, 8 * (double)p.dense_bytes / weights,
           8 * (double)p.sparse_bytes / weights);
    for (int from_memory = 1; from_memory >= 0; --from_memory) {
        int64_t n = from_memory ? (int64_t)(pool_bytes / p.dense_bytes / TILE * TILE) : TILE;
        int times = from_memory ? calls : 1000 * calls;
        uint8_t *dense_pool = copies(p.dense, p.dense_bytes, n);
        printf(" %.4f", timed(dense_panels, dense_pool, p.dense_bytes, n, groups, x, bases, times));
        free(dense_pool);
        uint8_t *sparse_pool = copies(p.sparse, p.sparse_bytes, n);
        printf(" %.4f", timed(sparse_panels, sparse_pool, p.sparse_bytes, n, groups, x, bases, times));
        free(sparse_pool);
    }
    printf("\n");
    return 0;
}
