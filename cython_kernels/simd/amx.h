/* The AVX-512 vocabulary plus the tile unit: eight registers of up to 16 rows x 64 bytes.
 *
 * Words are assembly with a memory clobber: gcc's intrinsics do not tell the compiler that a tile load reads memory. */
#if !(defined(__AMX_TILE__) && defined(__AMX_BF16__)) && !(defined(__AMXTILE__) && defined(__AMXBF16__)) /* old clang */
#error "compile this with -mamx-tile -mamx-bf16"
#endif
#include "simd/avx512.h"

#define PW_AMX 1

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* tmm0, 1: sums of the first `upper` rows, tmm2, 3: of `lower` more; tmm4, 5: activations of either; tmm6, 7: weights.
 * Nothing is done where this is the thread's shape already. */
static __thread int tile_shape;
PW_INLINE void tiles_begin(int upper, int lower) {
    static const uint8_t is_lower[8] = {0, 0, 1, 1, 0, 1, 0, 0};
    int shape = upper << 8 | lower;
    if (tile_shape == shape) return;
    tile_config c = {.palette = 1};
    for (int i = 0; i < 8; ++i) {
        c.row_bytes[i] = TILE_ROW_BYTES;
        c.rows[i] = (uint8_t)(i >= 6 ? TILE_ROWS : is_lower[i] ? lower : upper);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
    tile_shape = shape;
}

/* Gives the tile state back, so that the system need not save it. */
PW_INLINE void tiles_end(void) {
    if (tile_shape) __asm__ volatile("tilerelease");
    tile_shape = 0;
}

#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_DOT_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
