/* The AVX-512 vocabulary plus the words of the tile unit: eight registers of up to 16 rows x 64 bytes.
 *
 * Words are assembly with a memory clobber: gcc's intrinsics do not tell the compiler that a tile load reads memory. */
#if !(defined(__AMX_TILE__) && defined(__AMX_BF16__)) && !(defined(__AMXTILE__) && defined(__AMXBF16__)) /* old clang */
#error "compile this with -mamx-tile -mamx-int8 -mamx-bf16"
#endif
#include "simd/avx512.h"

#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease")
#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride)) : "memory")
/* For what is read once: it passes through L1 without driving out what stays there. */
#define TILE_LOAD_ONCE(t, p, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_DOT_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DOT_INT8(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::) /* signed a */
#define TILE_DOT_SIGNED(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::) /* and b */

/* Two vectors of float32 as pairs of bf16, to nearest even; subnormals are zero, as in the tile unit. */
#define PW_BF16_PAIRS 1
PW_INLINE vi bf16_pairs(vf even, vf odd) {
    static const uint16_t interleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(interleaved), halves);
}

/* Of both halves of a lane: (codes - zeros) subs, as far as 16 bits go. */
PW_INLINE vi scaled_halves(vi codes, vi zeros, vi subs) {
    return _mm512_mullo_epi16(_mm512_sub_epi16(codes, zeros), subs);
}

#include "simd/tiles.h"
