/* One product by the kernels named in argv[1], on a team of argv[2] threads if it is there, for a machine that is not this
 * one: operands on stdin, y on stdout.
 * stdin: int32 kind, group, zero_point, scale_bytes, has_mins, path, top_exponent, k_parts, mr, panels, block_m, block_n, block_k,
 * loop_order; int64 n, k, m, and the bytes of values, of scales and of offsets (0: dense); then values, scales, mins, offsets,
 * x float32 [m][k].
 * stdout: y float32 [m][n]. Exit status 3: those kernels do not run here. */
#include <stdio.h>
#include <stdlib.h>

#include "dispatch.h"
#include "team/product.h"

typedef struct {
    pw_product product;
    pw_schedule schedule;
    pw_crew crew;
} shared_product;

static void multiply(void *context, int member) {
    const shared_product *s = context;
    pw_multiply(&s->product, &s->schedule, &s->crew, member);
}

static void *read_bytes(size_t bytes) {
    void *place = malloc(bytes ? bytes : 1);
    if (!place || fread(place, 1, bytes, stdin) != bytes) exit(1);
    return place;
}

int main(int argc, char **argv) {
    if (argc < 2 || pw_select(argv[1])) return 3;
    int threads = argc > 2 ? atoi(argv[2]) : 1;
    int32_t *fields = read_bytes(14 * sizeof(int32_t));
    int64_t *sizes = read_bytes(6 * sizeof(int64_t));
    int64_t n = sizes[0], k = sizes[1], m = sizes[2];
    pw_weight w = {.kind = fields[0], .group = fields[1], .zero_point = fields[2], .scale_bytes = fields[3],
                   .path = fields[5], .top_exponent = fields[6], .k_parts = fields[7], .n = n, .k = k};
    w.values = read_bytes((size_t)sizes[3]);
    if (sizes[4]) w.scales = read_bytes((size_t)sizes[4]);
    if (fields[4]) w.mins = read_bytes((size_t)sizes[4]);
    if (sizes[5]) w.offsets = read_bytes((size_t)sizes[5]);
    const float *x = read_bytes((size_t)(m * k) * sizeof(float));

    if (pw_weight_problem(&w)) return 2;
    const pw_gemm_kernels *kernels = &pw_active()->gemm;
    pw_form form = pw_form_of(&w);
    pw_activations rows = {.row_bytes = kernels->row_bytes(&form, k)};
    void *prepared = aligned_alloc(64, (size_t)(rows.row_bytes * m + 63) / 64 * 64);
    float *y = calloc((size_t)(m * n), sizeof(float));
    if (!prepared || !y) return 1;
    rows.rows = prepared;
    pw_schedule schedule = {.mr = fields[8], .panels = fields[9], .block_m = fields[10], .block_n = fields[11],
                            .block_k = fields[12], .loop_order = fields[13], .prefetch_bytes = 512, .threads_m = 1,
                            .threads_n = threads, .threads_k = 1};
    kernels->prepare_rows(&form, k, x, k, (pw_range){0, m}, prepared);
    char message[256];
    pw_team *team = threads > 1 ? pw_team_open(threads, NULL, NULL, 100, message, sizeof message) : NULL;
    pw_ticket *tickets = aligned_alloc(sizeof(pw_ticket), (size_t)threads * sizeof(pw_ticket));
    if (!tickets || (threads > 1 && !team)) return 1;
    pw_clear_tickets(tickets, threads, 1, 0);
    shared_product shared = {{.weight = &w, .x = rows, .rows = m, .y = y, .ldy = n, .epilogue = PW_STORE}, schedule,
                             {.team = team, .threads = threads, .kernels = kernels, .tickets = tickets, .most_regions = threads}};
    if (!team) multiply(&shared, 0);
    else if (pw_team_run(team, multiply, &shared)) return 1;
    if (team) pw_team_close(team);
    return fwrite(y, sizeof(float), (size_t)(m * n), stdout) == (size_t)(m * n) ? 0 : 1;
}
