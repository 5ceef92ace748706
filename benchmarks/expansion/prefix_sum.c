/* SparAMX's Algorithm 1 beside our way to find where a vector row's kept values begin.
 *
 *     cc -O3 -march=native -o prefix_sum benchmarks/expansion/prefix_sum.c && ./prefix_sum
 *
 * Ours counts the bits of a mask and moves one pointer, row after row. Algorithm 1 counts the bits of sixteen masks in one
 * vector, adds them up by four shifted additions, and has sixteen places that wait for nothing. Both expand 32 bf16 of each row
 * and multiply them by a row of x (float32 multiply-adds). A core with AVX-512, VBMI2 and VPOPCNTDQ; prints ns a vector row of
 * 32 weights: in L2, and from memory. The two sums must be equal. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS_OF_SLOT = 32, MASK_BYTES = 4 * ROWS_OF_SLOT, ROUNDS = 9 };

typedef struct {
    uint8_t *bytes;
    size_t *slots; /* where each begins */
    size_t count;
} stream;

static uint64_t random_bits(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* Slots of 32 masks and the values that they keep, about `kept` of 32 each; the last slots have room behind them. */
static stream made_stream(size_t count, int kept) {
    stream s = {calloc(count * (MASK_BYTES + 64 * ROWS_OF_SLOT) + 4096, 1), malloc(count * sizeof(size_t)), count};
    uint64_t state = 88172645463325252u;
    size_t at = 0;
    if (!s.bytes || !s.slots) exit(1);
    for (size_t i = 0; i < count; ++i) {
        uint32_t masks[ROWS_OF_SLOT];
        size_t values = at + MASK_BYTES;
        s.slots[i] = at;
        for (int row = 0; row < ROWS_OF_SLOT; ++row) {
            uint32_t mask = 0;
            uint64_t bits = 0;
            for (int bit = 0; bit < 32; ++bit, bits >>= 5) { /* five bits of a word for each */
                if (bit % 12 == 0) bits = random_bits(&state);
                mask |= (uint32_t)((int)(bits % 32) < kept) << bit;
            }
            masks[row] = mask;
            for (int left = __builtin_popcount(mask); left; --left, values += 2) {
                uint16_t value = (uint16_t)(0x3F80 + (i + (size_t)left) % 128); /* 1 to 2 */
                memcpy(s.bytes + values, &value, 2);
            }
        }
        memcpy(s.bytes + at, masks, sizeof masks);
        at = (values + 3) / 4 * 4;
    }
    return s;
}

static inline void add_row(uint32_t mask, const uint8_t *values, const float *x, __m512 *even, __m512 *odd) {
    __m512i row = _mm512_maskz_expand_epi16(mask, _mm512_loadu_si512(values));
    __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(row, 16));
    __m512 second = _mm512_castsi512_ps(_mm512_and_si512(row, _mm512_set1_epi32((int)0xFFFF0000)));
    *even = _mm512_fmadd_ps(_mm512_set1_ps(x[0]), first, *even);
    *odd = _mm512_fmadd_ps(_mm512_set1_ps(x[1]), second, *odd);
}

static inline uint32_t mask_of(const uint8_t *masks, int row) {
    uint32_t mask;
    memcpy(&mask, masks + 4 * row, sizeof mask);
    return mask;
}

static float by_pointer(const stream *s, const float *x) {
    __m512 even[4] = {0}, odd[4] = {0};
    for (size_t i = 0; i < s->count; ++i) {
        const uint8_t *masks = s->bytes + s->slots[i], *values = masks + MASK_BYTES;
        for (int row = 0; row < ROWS_OF_SLOT; ++row) {
            uint32_t mask = mask_of(masks, row);
            __builtin_prefetch(values + 2048);
            add_row(mask, values, x + 2 * row, &even[row % 4], &odd[row % 4]);
            values += 2 * __builtin_popcount(mask);
        }
    }
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) sum = _mm512_add_ps(sum, _mm512_add_ps(even[i], odd[i]));
    return _mm512_reduce_add_ps(sum);
}

/* Of sixteen counts, the sum of those before each; *all: of all. */
static inline __m512i sums_before(__m512i counts, int *all) {
    const __m512i zero = _mm512_setzero_si512();
    __m512i sums = counts;
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 15));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 14));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 12));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 8));
    *all = _mm_extract_epi32(_mm512_extracti32x4_epi32(sums, 3), 3);
    return _mm512_sub_epi32(sums, counts);
}

static float by_prefix_sums(const stream *s, const float *x) {
    __m512 even[4] = {0}, odd[4] = {0};
    for (size_t i = 0; i < s->count; ++i) {
        const uint8_t *masks = s->bytes + s->slots[i], *values = masks + MASK_BYTES;
        for (int half = 0; half < ROWS_OF_SLOT; half += 16) {
            int32_t places[16] __attribute__((aligned(64)));
            int all;
            __m512i counts = _mm512_popcnt_epi32(_mm512_loadu_si512(masks + 4 * half));
            _mm512_store_si512(places, sums_before(counts, &all));
            for (int row = 0; row < 16; ++row) {
                const uint8_t *from = values + 2 * places[row];
                __builtin_prefetch(from + 2048);
                add_row(mask_of(masks, half + row), from, x + 2 * (half + row), &even[row % 4], &odd[row % 4]);
            }
            values += 2 * all;
        }
    }
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) sum = _mm512_add_ps(sum, _mm512_add_ps(even[i], odd[i]));
    return _mm512_reduce_add_ps(sum);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The least of some rounds, in ns a vector row. */
static double timed(float (*sum_of)(const stream *, const float *), const stream *s, const float *x, int repeats, float *sum) {
    double least = 1e9;
    for (int round = 0; round < ROUNDS; ++round) {
        double began = seconds();
        for (int i = 0; i < repeats; ++i) *sum = sum_of(s, x);
        double ns = 1e9 * (seconds() - began) / ((double)repeats * (double)s->count * ROWS_OF_SLOT);
        if (ns < least) least = ns;
    }
    return least;
}

int main(void) {
    float x[2 * ROWS_OF_SLOT];
    for (int i = 0; i < 2 * ROWS_OF_SLOT; ++i) x[i] = (float)(i % 7);
    printf("zeros, where, pointer ns a row, prefix sums ns a row, ratio\n");
    for (int kept = 16; kept >= 3; kept = kept == 16 ? 10 : kept == 10 ? 3 : 0) {
        for (int is_cold = 0; is_cold < 2; ++is_cold) {
            stream s = made_stream(is_cold ? 1 << 18 : 256, kept);
            float one_sum, other_sum;
            int repeats = is_cold ? 1 : 400;
            double pointer = timed(by_pointer, &s, x, repeats, &one_sum);
            double prefix = timed(by_prefix_sums, &s, x, repeats, &other_sum);
            if (one_sum != other_sum) return 1;
            printf("%d %%, %s, %.2f, %.2f, %.2f\n", 100 * (32 - kept) / 32, is_cold ? "memory" : "L2", pointer, prefix, pointer / prefix);
            free(s.bytes);
            free(s.slots);
        }
    }
    return 0;
}
