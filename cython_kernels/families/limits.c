/* families/limits.c: loops that do nothing but run one core into a limit, so that every speed can be given as a
 * share of it. Compiled once per ISA; each returns the operations done (a multiply and an add count as two) or
 * the bytes read. Twelve independent accumulators cover 4 cycles of latency on 2 ports with room to spare; the
 * loops are written in assembly because a compiler may spill an accumulator and halve the rate.              */
#include "cpu.h"
#include "families/slots.h"

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(PW_NEON)
/* Four ports of 4 cycles of latency want sixteen accumulators; 24 and 25 hold the operands, 26 is free. */
enum { LIMIT_ACCUMULATORS = 24 };
#define LIMIT_EACH "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23"
#define LIMIT_LOOP(body, ops_per_accumulator)                                                                  \
    uint64_t left = rounds | 1;                                                                                \
    __asm__ volatile(".irp r," LIMIT_EACH ",24,25\n\t"                                                          \
                     "movi v\\r\\().4s, #0\n\t"                                                                \
                     ".endr\n"                                                                                 \
                     "1:\n\t"                                                                                  \
                     ".irp r," LIMIT_EACH "\n\t" body "\n\t"                                                   \
                     ".endr\n\t"                                                                               \
                     "subs %0, %0, #1\n\t"                                                                     \
                     "b.ne 1b"                                                                                 \
                     : "+r"(left)::"v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",   \
                       "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23",     \
                       "v24", "v25", "v26", "cc");                                                             \
    return (rounds | 1) * LIMIT_ACCUMULATORS * (ops_per_accumulator);
#define LIMIT_STEP(name, sums, operands) name " v\\r\\()." sums ", v24." operands ", v25." operands
#else
enum { LIMIT_ACCUMULATORS = 12 };
#endif

#if defined(__AVX2__)
/* `rounds` times: the instructions of `body` for each accumulator \r; 12 and 13 hold the operands, 14 is free. */
#define LIMIT_LOOP(body, ops_per_accumulator)                                                            \
    uint64_t left = rounds | 1;                                                                                \
    __asm__ volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13\n\t"                                              \
                     "vpxor %%xmm\\r, %%xmm\\r, %%xmm\\r\n\t"                                                 \
                     ".endr\n"                                                                                 \
                     "1:\n\t"                                                                                  \
                     ".irp r,0,1,2,3,4,5,6,7,8,9,10,11\n\t" body "\n\t"                                        \
                     ".endr\n\t"                                                                               \
                     "decq %0\n\t"                                                                             \
                     "jnz 1b"                                                                                  \
                     : "+r"(left)::"xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",     \
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "cc");                             \
    return (rounds | 1) * LIMIT_ACCUMULATORS * (ops_per_accumulator);
#define LIMIT_STEP(file, name) name " %%" file "12, %%" file "13, %%" file "\\r"
/* Without VNNI an exact product of bytes is one of 16-bit pairs, and an addition. */
#define LIMIT_MADD(file)                                                                                       \
    "vpmaddwd %%" file "12, %%" file "13, %%" file "14\n\tvpaddd %%" file "14, %%" file "\\r, %%" file "\\r"
#endif

uint64_t ISA(limit_f32)(uint64_t rounds) {
#if defined(__AVX512F__)
    LIMIT_LOOP(LIMIT_STEP("zmm", "vfmadd231ps"), 16 * 2)
#elif defined(__FMA__)
    LIMIT_LOOP(LIMIT_STEP("ymm", "vfmadd231ps"), 8 * 2)
#elif defined(PW_NEON)
    LIMIT_LOOP(LIMIT_STEP("fmla", "4s", "4s"), 4 * 2)
#else
    /* No fused multiply-add in the baseline: four-lane multiplies and adds in the compiler's own words. */
    typedef float v4 __attribute__((vector_size(16)));
    v4 acc[LIMIT_ACCUMULATORS] = {{0}}, x = {0};
    for (uint64_t round = 0; round < rounds; ++round)
        for (int i = 0; i < LIMIT_ACCUMULATORS; ++i) {
            v4 product = x * x;
            acc[i] = acc[i] + product;
#if defined(__x86_64__)
            __asm__ volatile("" : "+x"(acc[i]), "+x"(x));
#else
            __asm__ volatile("" : "+w"(acc[i]), "+w"(x));
#endif
        }
    return rounds * LIMIT_ACCUMULATORS * 4 * 2;
#endif
}

#if defined(__AMX_TILE__)
/* Four tiles accumulate products of two by two operands: the most that eight registers feed. */
#define LIMIT_TILES(product, ops_per_tile)                                                                     \
    struct { uint8_t palette, start, zero[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shape = {.palette = 1}; \
    static const char ones[1024] = {1};                                                                        \
    for (int i = 0; i < 8; ++i) shape.row_bytes[i] = 64, shape.rows[i] = 16;                                   \
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* the intrinsic claims to read eight bytes of it */          \
    _tile_loadconfig(&shape);                                                                                  \
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);                                                \
    _tile_loadd(4, ones, 64); _tile_loadd(5, ones, 64); _tile_loadd(6, ones, 64); _tile_loadd(7, ones, 64);    \
    for (uint64_t round = 0; round < rounds; ++round) {                                                        \
        product(0, 4, 6); product(1, 4, 7); product(2, 5, 6); product(3, 5, 7);                                \
    }                                                                                                          \
    _tile_release();                                                                                           \
    return rounds * 4 * (ops_per_tile);
#endif

uint64_t ISA(limit_f16)(uint64_t rounds) {
#if defined(__AVX512FP16__)
    LIMIT_LOOP(LIMIT_STEP("zmm", "vfmadd231ph"), 32 * 2)
#else
    return ISA(limit_f32)(rounds);
#endif
}

uint64_t ISA(limit_bf16)(uint64_t rounds) {
#if defined(__AMX_BF16__)
    LIMIT_TILES(_tile_dpbf16ps, 16 * 16 * 32 * 2)
#elif defined(__AVX512BF16__)
    LIMIT_LOOP(LIMIT_STEP("zmm", "vdpbf16ps"), 32 * 2)
#elif defined(PW_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    LIMIT_LOOP(LIMIT_STEP("bfdot", "4s", "8h"), 8 * 2)
#else
    return ISA(limit_f32)(rounds); /* weights are widened and multiplied as f32 */
#endif
}

uint64_t ISA(limit_int8)(uint64_t rounds) {
#if defined(__AMX_INT8__)
    LIMIT_TILES(_tile_dpbusd, 16 * 16 * 64 * 2)
#elif defined(__AVX512VNNI__)
    LIMIT_LOOP(LIMIT_STEP("zmm", "vpdpbusd"), 64 * 2)
#elif defined(__AVXVNNI__)
    LIMIT_LOOP("%{vex%} " LIMIT_STEP("ymm", "vpdpbusd"), 32 * 2)
#elif defined(__AVX512BW__)
    LIMIT_LOOP(LIMIT_MADD("zmm"), 32 * 2)
#elif defined(__AVX2__)
    LIMIT_LOOP(LIMIT_MADD("ymm"), 16 * 2)
#elif defined(PW_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
    LIMIT_LOOP(LIMIT_STEP("usdot", "4s", "16b"), 16 * 2)
#elif defined(PW_NEON) && defined(__ARM_FEATURE_DOTPROD)
    LIMIT_LOOP(LIMIT_STEP("sdot", "4s", "16b"), 16 * 2)
#elif defined(PW_NEON)
    LIMIT_LOOP("smull v26.8h, v24.8b, v25.8b\n\tsadalp v\\r\\().4s, v26.8h", 8 * 2)
#else
    return ISA(limit_f32)(rounds);
#endif
}

/* Reads the whole blocks of equal parts of a buffer side by side, each prefetched a given number of bytes ahead, or not at all. */
static inline __attribute__((always_inline)) uint64_t read_streams(const char *buffer, size_t bytes, int streams,
                                                                   int ahead) {
    enum { BLOCK = 512 };
    const size_t part = bytes / (size_t)(streams * BLOCK) * BLOCK;
    for (size_t offset = 0; offset < part; offset += BLOCK)
        for (int stream = 0; stream < streams; ++stream) {
            const char *block = buffer + stream * part + offset;
            for (int line = 0; line < BLOCK; line += 64) {
                if (ahead) __builtin_prefetch(block + line + ahead);
#if defined(__AVX512F__)
                __asm__ volatile("vmovups %0, %%zmm0" ::"m"(*(const char(*)[64])(block + line)) : "xmm0");
#elif defined(__AVX2__)
                __asm__ volatile("vmovups %0, %%ymm0" ::"m"(*(const char(*)[32])(block + line)) : "xmm0");
                __asm__ volatile("vmovups %0, %%ymm0" ::"m"(*(const char(*)[32])(block + line + 32)) : "xmm0");
#elif defined(PW_NEON)
                __asm__ volatile("ldp q0, q1, %0" ::"Ump"(*(const __int128 *)(block + line)) : "v0", "v1");
                __asm__ volatile("ldp q0, q1, %0" ::"Ump"(*(const __int128 *)(block + line + 32)) : "v0", "v1");
#else
                for (int word = 0; word < 64; word += 8)
                    __asm__ volatile("" ::"r"(*(const uint64_t *)(block + line + word)));
#endif
            }
        }
    return (uint64_t)streams * part;
}

/* By the fastest shape that is known for this core. The two shapes are written out, so that each loop is unrolled. */
uint64_t ISA(limit_read)(const void *buffer, size_t bytes) {
    const pw_core_traits *core = pw_core();
    if (core->read_streams == 1) return read_streams(buffer, bytes, 1, core->read_ahead_bytes);
    return read_streams(buffer, bytes, 2, core->read_ahead_bytes);
}
