/* The shape of a thread's tiles, over the words of a tile unit (TILE_CONFIGURE, TILE_RELEASE). */
#define PW_AMX 1

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

/* What ldtilecfg reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* tmm0, 1: sums of the first `upper` rows, tmm2, 3: of `lower` more; tmm4, 5: activations of either; tmm6, 7: weights.
 * Nothing is done where this is the thread's shape already. One for all units: gemm_amx.c has it. */
extern __thread int pw_tile_shape __attribute__((visibility("hidden")));
PW_INLINE void tiles_begin(int upper, int lower) {
    static const uint8_t is_lower[8] = {0, 0, 1, 1, 0, 1, 0, 0};
    int shape = upper << 8 | lower;
    if (pw_tile_shape == shape) return;
    tile_config c = {.palette = 1};
    for (int i = 0; i < 8; ++i) {
        c.row_bytes[i] = TILE_ROW_BYTES;
        c.rows[i] = (uint8_t)(i >= 6 ? TILE_ROWS : is_lower[i] ? lower : upper);
    }
    TILE_CONFIGURE(c);
    pw_tile_shape = shape;
}

/* Gives the tile state back, so that the system need not save it. */
PW_INLINE void tiles_end(void) {
    if (pw_tile_shape) TILE_RELEASE();
    pw_tile_shape = 0;
}
