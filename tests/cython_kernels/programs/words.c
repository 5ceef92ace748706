/* What every vocabulary must mean by its words (simd/<name>.h, named by -include), but for the dots of groups, which
 * products test. Exit status 0, or a broken law on stderr. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static void must(int holds, const char *law, int line) {
    if (holds) return;
    fprintf(stderr, "line %d: %s\n", line, law);
    exit(1);
}
#define MUST(law) must(law, #law, __LINE__)

enum { MOST = 16, SAMPLES = 4096 };

static int same(float a, float b) { return isnan(a) ? isnan(b) : pw_float_to_bits(a) == pw_float_to_bits(b); }
static int same_half(uint16_t a, uint16_t b) {
    return isnan(pw_from_f16(a)) ? isnan(pw_from_f16(b)) : a == b;
}

/* Every kind of float: any bits, and the specials now and then. */
static float any_float(void) {
    static const float specials[] = {0.0f, -0.0f, 1.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, 65504.0f, 65520.0f, 0x1p-24f};
    int pick = rand() % 40;
    return pick < 10 ? specials[pick] : pw_bits_to_float((uint32_t)rand() << 16 ^ (uint32_t)rand());
}
static float small_float(void) { return (float)(rand() % 2048 - 1024) / 64.0f; }

static void arithmetic_is_by_lane(void) {
    float a[MOST + 1], b[MOST + 1], c[MOST + 1], out[MOST + 1];
    for (int i = 0; i < LANES; ++i) a[i + 1] = small_float(), b[i + 1] = small_float() + 0.25f, c[i + 1] = small_float();
    vf va = v_load(a + 1), vb = v_load(b + 1), vc = v_load(c + 1); /* unaligned */
#define BY_LANE(word, expected)                                       \
    v_store(out + 1, word);                                           \
    for (int i = 1; i <= LANES; ++i) MUST(same(out[i], expected));
    BY_LANE(v_add(va, vb), a[i] + b[i])
    BY_LANE(v_sub(va, vb), a[i] - b[i])
    BY_LANE(v_mul(va, vb), a[i] * b[i])
    BY_LANE(v_div(va, vb), a[i] / b[i])
    BY_LANE(v_fma(va, vb, vc), a[i] * b[i] + c[i])
    BY_LANE(v_set1(2.5f), 2.5f)
    BY_LANE(v_zero(), 0.0f)
    float sum = 0.0f, top = -INFINITY;
    for (int i = 1; i <= LANES; ++i) sum += a[i], top = a[i] > top ? a[i] : top;
    MUST(v_sum(va) == sum); /* multiples of 2^-6 below 2^10: any order is exact */
    MUST(v_max_all(va) == top);
}

#ifdef PW_FMA_IN_DOUBLE
int pw_cpu_fuses; /* cpu.c has it elsewhere */
#endif

/* Of any floats, and of sums that lose most of their digits, or end between two floats. */
static void fma_rounds_once(void) {
    float a[MOST], b[MOST], c[MOST], out[MOST];
    for (int i = 0; i < LANES; ++i) {
        int near = rand() % 3;
        a[i] = near ? small_float() + 0x1p-20f : any_float(), b[i] = near ? 1.0f + (float)rand() * 0x1p-40f : any_float();
        c[i] = near == 1 ? -a[i] * b[i] : near ? a[i] * 0x1p-25f : any_float();
    }
    v_store(out, v_fma(v_load(a), v_load(b), v_load(c)));
    for (int i = 0; i < LANES; ++i) MUST(same(out[i], fmaf(a[i], b[i], c[i])));
#ifdef PW_FMA_IN_DOUBLE
    v_store(out, fma_in_double(v_load(a), v_load(b), v_load(c)));
    for (int i = 0; i < LANES; ++i) MUST(same(out[i], fmaf(a[i], b[i], c[i])));
#endif
}

static void sums_are_of_halves(void) {
    float x[MOST];
    for (int i = 0; i < LANES; ++i) x[i] = (float)rand() * 0x1p-31f - 0.5f;
    float sum = v_sum(v_load(x));
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    MUST(same(sum, x[0]));
}

static void the_second_survives_a_nan(void) {
    float a[MOST], b[MOST], larger[MOST], smaller[MOST];
    for (int i = 0; i < LANES; ++i) a[i] = any_float(), b[i] = any_float();
    v_store(larger, v_max(v_load(a), v_load(b)));
    v_store(smaller, v_min(v_load(a), v_load(b)));
    for (int i = 0; i < LANES; ++i) {
        MUST(same(larger[i], a[i] > b[i] ? a[i] : b[i]) || (a[i] == 0 && b[i] == 0));
        MUST(same(smaller[i], a[i] < b[i] ? a[i] : b[i]) || (a[i] == 0 && b[i] == 0));
    }
}

static void halves_are_those_of_common_h(void) {
    for (uint32_t first = 0; first < 1 << 16; first += LANES) {
        uint16_t half[MOST], back[MOST];
        float wide[MOST];
        for (int i = 0; i < LANES; ++i) half[i] = (uint16_t)(first + (uint32_t)i);
        v_store(wide, v_load_f16(half));
        v_store_f16(back, v_load(wide));
        for (int i = 0; i < LANES; ++i) {
            MUST(same(wide[i], pw_from_f16(half[i])));
            MUST(same_half(back[i], half[i]));
        }
    }
    for (int sample = 0; sample < SAMPLES; ++sample) {
        uint16_t half[MOST];
        float x[MOST];
        for (int i = 0; i < LANES; ++i) x[i] = sample % 2 ? any_float() : small_float() * 0x1p-20f;
        v_store_f16(half, v_load(x));
        for (int i = 0; i < LANES; ++i) MUST(same_half(half[i], pw_to_f16(x[i])));
    }
}

/* The last bytes of a page before one that must not be touched, and the first after such a one. */
static void the_first_n_touch_no_other(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(pages != MAP_FAILED);
    MUST(!mprotect(pages, page, PROT_NONE) && !mprotect(pages + 2 * page, page, PROT_NONE));
    float *first = (float *)(void *)(pages + page), *end = (float *)(void *)(pages + 2 * page), out[MOST], ones[MOST];
    for (int i = 0; i < MOST; ++i) ones[i] = 1.0f;
    for (int n = 1; n <= LANES; ++n) {
        for (int at_end = 0; at_end < 2; ++at_end) {
            float *place = at_end ? end - n : first;
            for (float *p = first; p < end; ++p) *p = -5.0f;
            v_store_n(place, v_load(ones), n);
            for (float *p = first; p < end; ++p) MUST(*p == (p >= place && p < place + n ? 1.0f : -5.0f));
            for (int i = 0; i < n; ++i) place[i] = (float)(i + 1);
            v_store(out, v_load_n(place, n));
            for (int i = 0; i < LANES; ++i) MUST(out[i] == (i < n ? (float)(i + 1) : 0.0f));
        }
    }
    munmap(pages, 3 * page);
}

static void integers_are_by_lane(void) {
    int32_t a[MOST], b[MOST], out[MOST];
    for (int i = 0; i < LANES; ++i) a[i] = rand() - RAND_MAX / 2, b[i] = rand() - RAND_MAX / 2;
    vi va = vi_load(a), vb = vi_load(b);
#define INTEGERS(word, expected)                                      \
    vi_store(out, word);                                              \
    for (int i = 0; i < LANES; ++i) MUST(out[i] == (int32_t)(expected));
    INTEGERS(vi_add(va, vb), (uint32_t)a[i] + (uint32_t)b[i])
    INTEGERS(vi_sub(va, vb), (uint32_t)a[i] - (uint32_t)b[i])
    INTEGERS(vi_and(va, vb), a[i] & b[i])
    INTEGERS(vi_or(va, vb), a[i] | b[i])
    INTEGERS(vi_max(va, vb), a[i] > b[i] ? a[i] : b[i])
    INTEGERS(vi_shl(va, 16), (uint32_t)a[i] << 16)
    INTEGERS(vi_shr(va, 4), (uint32_t)a[i] >> 4)
    INTEGERS(vi_set1(-7), -7)
    INTEGERS(v_bits(vi_as_vf(va)), a[i])
    uint32_t sum = 0;
    int32_t top = INT32_MIN;
    for (int i = 0; i < LANES; ++i) sum += (uint32_t)a[i], top = a[i] > top ? a[i] : top;
    MUST(vi_sum(va) == (int32_t)sum);
    MUST(vi_max_all(va) == top);
    float wide[MOST];
    v_store(wide, vi_to_vf(va));
    for (int i = 0; i < LANES; ++i) MUST(wide[i] == (float)a[i]);
}

static void rounding_is_to_nearest_even(void) {
    float x[MOST];
    int32_t out[MOST];
    for (int i = 0; i < LANES; ++i) x[i] = rand() % 2 ? (float)(rand() % 512 - 256) / 2.0f : small_float() * 4000.0f;
    vi_store(out, v_round(v_load(x)));
    for (int i = 0; i < LANES; ++i) MUST(out[i] == (int32_t)rintf(x[i]));
    int8_t bytes[MOST + 1], expected[MOST];
    for (int i = 0; i < LANES; ++i) expected[i] = (int8_t)(rand() % 255 - 127), out[i] = expected[i];
    bytes[LANES] = 99;
    vi_store_i8(bytes, vi_load(out));
    MUST(!memcmp(bytes, expected, LANES) && bytes[LANES] == 99);
}

/* Of codes up to `most`, as many quads as sixteen bits hold where PW_DOT_HALVES; scaled like a group of a block. */
static void dots_of_small_codes_are_exact(int most) {
    int quads = PW_DOT_HALVES ? 32767 / (2 * 127 * most) : 8, extreme = rand() % 2;
    uint8_t w[8][4 * MOST];
    int8_t a[8][4];
    int32_t before[MOST], subs[MOST], words[MOST], out[MOST];
    if (quads > 8) quads = 8;
    for (int q = 0; q < quads; ++q) {
        for (int i = 0; i < 4 * LANES; ++i) w[q][i] = (uint8_t)(extreme ? most : rand() % (most + 1));
        for (int i = 0; i < 4; ++i) a[q][i] = (int8_t)(extreme ? 127 : rand() % 255 - 127);
    }
    for (int i = 0; i < LANES; ++i) before[i] = rand() % 1000, subs[i] = rand() % 256 - 128;
    for (int i = 0; i < LANES; ++i) words[i] = PW_DOT_HALVES ? (subs[i] & 0xFFFF) | (int32_t)((uint32_t)subs[i] << 16) : subs[i];
    vi dots = vi_set1(0);
    for (int q = 0; q < quads; ++q) dots = q4_dot(dots, vi_load(w[q]), va4_load((const uint8_t *)a[q], 0));
    vi_store(out, add_scaled(vi_load(before), dots, vi_load(words)));
    for (int i = 0; i < LANES; ++i) {
        int32_t dot = 0;
        for (int q = 0; q < quads; ++q) {
            for (int j = 0; j < 4; ++j) dot += w[q][4 * i + j] * a[q][j];
        }
        MUST(out[i] == before[i] + subs[i] * dot);
    }
}

static void dots_of_wide_codes_are_exact(void) {
    uint8_t w[4 * MOST];
    int8_t a[4];
    int32_t out[MOST], one = PW_DOT_HALVES ? 0x10001 : 1;
    int extreme = rand() % 2;
    for (int i = 0; i < 4 * LANES; ++i) w[i] = (uint8_t)(extreme ? (rand() % 2 ? 1 : 255) : 1 + rand() % 255);
    for (int i = 0; i < 4; ++i) a[i] = (int8_t)(extreme ? (rand() % 2 ? 127 : -127) : rand() % 255 - 127);
    vi dots = wide_dot(vi_set1(0), vi_load(w), va4_load((const uint8_t *)a, 0));
    vi_store(out, add_scaled(vi_set1(5), dots, vi_set1(one)));
    for (int i = 0; i < LANES; ++i) {
        int32_t dot = 5;
        for (int j = 0; j < 4; ++j) dot += (w[4 * i + j] - WIDE_DOT_OFFSET) * a[j];
        MUST(out[i] == dot);
    }
}

static void pairs_are_multiplied_by_halves(void) {
    int16_t a[2 * MOST], b[2 * MOST];
    int32_t out[MOST];
    for (int i = 0; i < 2 * LANES; ++i) a[i] = (int16_t)(rand() % 8129 - 4064), b[i] = (int16_t)(rand() % 512 - 256);
    vi_store(out, pair_dot(vi_set1(-3), vi_load(a), vi_load(b)));
    for (int i = 0; i < LANES; ++i) MUST(out[i] == -3 + a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]);
}

int main(void) {
#if defined(PW_FMA_IN_DOUBLE) && defined(__x86_64__)
    pw_cpu_fuses = !!__builtin_cpu_supports("fma");
#endif
    halves_are_those_of_common_h();
    the_first_n_touch_no_other();
    for (int sample = 0; sample < SAMPLES; ++sample) {
        arithmetic_is_by_lane();
        fma_rounds_once();
        sums_are_of_halves();
        the_second_survives_a_nan();
        integers_are_by_lane();
        rounding_is_to_nearest_even();
        for (int bits = 2; bits <= 6; ++bits) dots_of_small_codes_are_exact((1 << bits) - 1);
        dots_of_wide_codes_are_exact();
        pairs_are_multiplied_by_halves();
    }
    return 0;
}
