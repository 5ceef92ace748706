/* Rows of every kind of number, where they lie, what is in y before, and what has to be so afterwards. */
#include "user_slots/rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Kinds of numbers, each a range of the pool. */
enum { PLAIN, ANY_BITS, SPECIAL, RARE, TINY, LARGEST, KINDS };
enum { POOL = PW_SLOT_MOST + 4096, RARITY = 97, BESIDE = 64 };

/* What is in y before a call. */
enum { POISON, ZEROS, NEARLY };

/* Which buffer y is. */
enum { APART, IN_A, IN_B };

typedef struct {
    const char *name;
    int kind_a, kind_b;
    bool at_end; /* rows end at a page that cannot be touched; else they begin behind one */
    int y, before;
} trial;

static const trial TRIALS[] = {
    {"plain rows", PLAIN, PLAIN, true, APART, POISON},
    {"plain rows, y holding nearly the result", PLAIN, PLAIN, false, APART, NEARLY},
    {"y being the first input", PLAIN, PLAIN, true, IN_A, POISON},
    {"y being the second input", PLAIN, PLAIN, false, IN_B, POISON},
    {"rows of any bits", ANY_BITS, PLAIN, false, APART, ZEROS},
    {"zeros, infinities, NaN and subnormals", SPECIAL, PLAIN, true, APART, POISON},
    {"special numbers here and there, in place", RARE, PLAIN, false, IN_A, POISON},
    {"special numbers here and there", RARE, RARE, true, APART, NEARLY},
    {"subnormals and the least numbers", TINY, PLAIN, true, APART, ZEROS},
    {"the largest numbers", LARGEST, PLAIN, false, APART, POISON},
    {"a second input of special numbers", PLAIN, SPECIAL, true, APART, ZEROS},
};
enum { TRIALS_OF_ALL = sizeof TRIALS / sizeof *TRIALS };

int pw_slot_trials(void) { return TRIALS_OF_ALL; }

const char *pw_slot_trial_name(int number) { return number >= 0 && number < TRIALS_OF_ALL ? TRIALS[number].name : ""; }

static bool is_norm(int slot) { return slot == PW_SLOT_RMS_NORM; }
static bool is_gate(int slot) { return slot >= PW_SLOT_GATES && slot < PW_SLOT_ACTIVATIONS; }
static bool is_activation(int slot) { return slot >= PW_SLOT_ACTIVATIONS && slot < PW_SLOT_EXPONENTIAL; }

uint64_t pw_slot_random(uint64_t seed, uint64_t i) { /* splitmix64 (Steele, Lea and Flood 2014) */
    uint64_t x = seed + (i + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float plain(uint64_t random) {
    float magnitude = 0.001f + 4.0f * (float)(random >> 40) * 0x1p-24f;
    return random & 1 ? magnitude : -magnitude;
}

static float special(uint64_t random) {
    static const uint32_t BITS[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000,
                                    0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F7FFFFF,
                                    0xFF7FFFFF, 0x3F800000, 0xC2AE0000, 0x42B10000};
    return of_bits(BITS[random >> 60]);
}

static float of_kind(int kind, uint64_t random) {
    bool is_special = kind == SPECIAL ? random % 3 == 0 : random % RARITY == 0;
    if ((kind == SPECIAL || kind == RARE) && is_special) return special(random);
    if (kind == ANY_BITS) return of_bits((uint32_t)(random >> 32));
    if (kind == TINY) return of_bits((uint32_t)(random >> 32) & (random & 2 ? 0x807FFFFFu : 0x80FFFFFFu));
    if (kind == LARGEST) return of_bits(((uint32_t)(random >> 32) & 0x807FFFFFu) | (uint32_t)(0x7C + (random & 2)) << 24);
    return plain(random);
}

bool pw_slot_open(pw_slot_check *check) {
    const pw_kernels *table = pw_active();
    check->built_in = pw_slot_of(&table->ops, check->slot);
    check->digest = 0xCBF29CE484222325u;
    check->pool = malloc(sizeof(float) * KINDS * POOL);
    check->wanted = malloc(sizeof(float) * PW_SLOT_MOST);
    if (!check->pool || !check->wanted) {
        pw_slot_close(check);
        return false;
    }
    for (int kind = 0; kind < KINDS; ++kind)
        for (int i = 0; i < POOL; ++i)
            check->pool[kind * POOL + i] = of_kind(kind, pw_slot_random(check->seed, (uint64_t)(kind * POOL + i)));
    return true;
}

void pw_slot_close(pw_slot_check *check) {
    free(check->pool);
    free(check->wanted);
}

static const float *numbers(const pw_slot_check *check, int kind, uint64_t turn) {
    return check->pool + kind * POOL + pw_slot_random(check->seed, turn) % (POOL - PW_SLOT_MOST);
}

void pw_slot_plain_rows(const pw_slot_check *check, int turn, int64_t n, float *a, float *b) {
    memcpy(a, numbers(check, PLAIN, 2 * (uint64_t)turn), sizeof(float) * (size_t)n);
    memcpy(b, numbers(check, PLAIN, 2 * (uint64_t)turn + 1), sizeof(float) * (size_t)n);
}

void pw_call_slot(int slot, pw_slot_function function, const pw_slot_call *call) {
    if (is_norm(slot)) ((pw_rms_norm_slot *)function)(call->n, call->a, call->b, call->eps, call->y);
    else if (is_gate(slot)) ((pw_gate_slot *)function)(call->n, call->a, call->b, call->y);
    else if (is_activation(slot)) ((pw_activation_slot *)function)(call->n, call->a, call->b, call->y);
    else ((pw_exponential_slot *)function)(call->n, call->a, call->y);
}

int64_t pw_slot_difference(int64_t n, const float *wanted, const float *given) {
    for (int64_t i = 0; i < n; ++i)
        if (bits_of(wanted[i]) != bits_of(given[i]) && !(isnan(wanted[i]) && isnan(given[i]))) return i;
    return -1;
}

/* Rounding, subnormals, masks: what a caller has set, without the flags that arithmetic raises. */
static uint64_t modes(void) {
#if defined(__x86_64__)
    uint16_t x87;
    __asm__ volatile("fnstcw %0" : "=m"(x87));
    return (_mm_getcsr() & 0xFFC0u) | (uint64_t)x87 << 16 | (uint64_t)(__builtin_ia32_readeflags_u64() & 0x40400u) << 32;
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
#else
    return 0;
#endif
}

static void add_to_digest(pw_slot_check *check, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = isnan(check->wanted[i]) ? 0x7FC00000u : bits_of(check->wanted[i]);
        check->digest = (check->digest ^ bits) * 0x100000001B3u;
    }
}

/* Whether this way means anything for the slot. */
static bool applies(const trial *way, int slot) {
    if (way->y == IN_B) return is_gate(slot);
    return way->kind_b == PLAIN || slot != PW_SLOT_EXPONENTIAL;
}

static void fill_before(const pw_slot_check *check, int before, int64_t n, float *y) {
    for (int64_t i = 0; i < n; ++i) y[i] = before == POISON ? NAN : 0.0f;
    if (before != NEARLY) return;
    memcpy(y, check->wanted, sizeof(float) * (size_t)n);
    uint64_t wrong = pw_slot_random(check->seed, (uint64_t)n) % (uint64_t)n;
    y[wrong] = of_bits(bits_of(y[wrong]) ^ 0x00400001u);
}

/* Marks beside a row in the checker's view, as far as there is room. */
static void mark(float *row, int64_t before, int64_t n, int64_t after) {
    for (int64_t i = 1; i <= before && i <= BESIDE; ++i) row[-i] = 1234.5f;
    for (int64_t i = 0; i < after && i < BESIDE; ++i) row[n + i] = 1234.5f;
}

static bool marks_are_there(const float *row, int64_t before, int64_t n, int64_t after) {
    bool same = true;
    for (int64_t i = 1; i <= before && i <= BESIDE; ++i) same &= row[-i] == 1234.5f;
    for (int64_t i = 0; i < after && i < BESIDE; ++i) same &= row[n + i] == 1234.5f;
    return same;
}

static const float EPS[] = {1e-5f, 1e-6f, 0.0f, 1e-12f, 1e-3f};

bool pw_try_slot(pw_slot_check *check, int number, int64_t n) {
    const trial *way = &TRIALS[number];
    pw_slot_place *place = check->place;
    pw_slot_verdict *verdict = check->verdict;
    if (!applies(way, check->slot)) return true;
    verdict->trial = number, verdict->n = n, verdict->index = 0;
    int64_t skip = way->at_end ? PW_SLOT_MOST - n : 0, left = PW_SLOT_MOST - n - skip;
    uint64_t turn = (uint64_t)(n * TRIALS_OF_ALL + number);
    size_t bytes = sizeof(float) * (size_t)n;
    float *a = place->a.own + skip, *b = place->b.own + skip;
    memcpy(a, numbers(check, way->kind_a, 2 * turn), bytes);
    memcpy(b, numbers(check, way->kind_b, 2 * turn + 1), bytes);
    bool has_second = !is_activation(check->slot) || (n + number) % 2;
    float eps = EPS[turn % (sizeof EPS / sizeof *EPS)];
    pw_call_slot(check->slot, check->built_in, &(pw_slot_call){n, a, has_second ? b : NULL, eps, check->wanted});
    add_to_digest(check, n < 64 ? n : 64);

    const pw_slot_rows *out = way->y == APART ? &place->y : way->y == IN_A ? &place->a : &place->b;
    float *y = out->own + skip;
    if (way->y == APART) fill_before(check, way->before, n, y);
    mark(y, skip, n, left);
    const float *first = (way->y == IN_A ? place->a.writable : place->a.read_only) + skip;
    const float *second = (way->y == IN_B ? place->b.writable : place->b.read_only) + skip;
    uint64_t before = modes();
    pw_call_slot(check->slot, check->function, &(pw_slot_call){n, first, has_second ? second : NULL, eps, out->writable + skip});
    verdict->outcome = modes() == before ? PW_SLOT_FAULTS : PW_SLOT_CHANGES_MODES;
    if (verdict->outcome == PW_SLOT_CHANGES_MODES) return false;
    verdict->index = pw_slot_difference(n, check->wanted, y);
    if (verdict->index >= 0) verdict->outcome = PW_SLOT_DIFFERS;
    else if (!marks_are_there(y, skip, n, left)) verdict->outcome = PW_SLOT_WRITES_BEYOND;
    else return true;
    return false;
}
