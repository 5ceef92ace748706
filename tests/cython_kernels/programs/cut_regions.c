/* How a member's region of a product is cut into pieces: random regions and schedules. Exit status 1: a law is broken. */
#include <stdio.h>
#include <stdlib.h>

#include "team/product.c"

/* What cutting does not ask for. */
void pw_share(const pw_schedule *s, const pw_weight *w, int64_t m, int32_t thread, pw_range *rows, pw_range *panels) {
    (void)s, (void)w, (void)m, (void)thread, (void)rows, (void)panels;
    abort();
}
const int64_t *pw_team_ends(const pw_team *team, bool streaming) {
    (void)team, (void)streaming;
    abort();
}
void pw_team_barrier(pw_team *team, int member) {
    (void)team, (void)member;
    abort();
}

static int64_t drawn(int64_t low, int64_t high) { return low + rand() % (high - low + 1); }

/* Whole tiles but for the end, and no more pieces than are wanted: each reads its weights anew. */
static int keeps_the_laws(const region *r, const pw_schedule *s, int64_t wanted) {
    int64_t rows = r->rows.end - r->rows.begin, panels = r->panels.end - r->panels.begin;
    int covers = r->row_pieces * r->piece_rows >= rows && r->panel_pieces * r->piece_panels >= panels &&
                 (r->row_pieces - 1) * r->piece_rows < rows && (r->panel_pieces - 1) * r->piece_panels < panels;
    int whole = (r->row_pieces == 1 || r->piece_rows % s->mr == 0) &&
                (r->panel_pieces == 1 || r->piece_panels % s->panels == 0);
    int few = r->row_pieces <= wanted || (s->loop_order == PW_LOOP_MN && r->piece_rows + s->mr > s->block_m);
    return covers && whole && few;
}

int main(void) {
    for (int i = 0; i < 200000; ++i) {
        pw_schedule s = {.mr = (int32_t)drawn(1, 14), .panels = (int32_t)drawn(1, 4), .loop_order = (int32_t)drawn(0, 1)};
        s.block_m = s.mr * (int32_t)drawn(1, 30);
        s.block_n = PW_PANEL * s.panels * (int32_t)drawn(1, 30);
        int64_t row = drawn(0, 40), panel = drawn(0, 40), wanted = drawn(1, 8);
        region r = {.rows = {row, row + drawn(1, 600)}, .panels = {panel, panel + drawn(1, 200)}};
        cut(&r, &s, wanted);
        if (keeps_the_laws(&r, &s, wanted)) continue;
        printf("%ld rows by %ld panels in tiles of %d by %d, %ld pieces wanted: %ld by %ld\n", (long)(r.rows.end - row),
               (long)(r.panels.end - panel), s.mr, s.panels, (long)wanted, (long)r.row_pieces, (long)r.panel_pieces);
        return 1;
    }
    return 0;
}
