/* Steps of a small model, run by three ranks that are threads here, and by one; the logits must be equal bit for bit.
 * Compiled with a sanitizer it shows that whatever another rank reads lies behind a barrier. Portable kernels alone.
 * Exit status 0, or what is wrong on stderr. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program/orders.h"

const pw_kernels pw_avx2_kernels, pw_avx_vnni_kernels, pw_avx512_kernels, pw_avx512_vnni_kernels,
    pw_avx512_bf16_kernels, pw_amx_kernels;
unsigned __wrap_pw_cpu_features(void);
unsigned __wrap_pw_cpu_features(void) { return 0; } /* what `ld --wrap` puts in place of cpu.c's answer */

enum {
    HIDDEN = 32, FFN = 48, VOCAB = 40, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 8, /* columns end inside panels; two of three ranks share a KV head */
    LAYERS = 2, TOKENS = 24, SLOTS = 512, SLICE_SLOTS = 160, RANKS = 3, STEPS = 40,
    Q = HEADS * HEAD_DIM, QKV = Q + 2 * KV_HEADS * HEAD_DIM,
};

static const int32_t three[] = {2, 1, 1}, two[] = {1, 2}, one[] = {1};
static pw_weight embedding, qkv, output, gate_up, down, head;
static float norm[HIDDEN];

static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static pw_weight random_weight(int64_t n, int64_t k) {
    int64_t count = pw_panels(n) * PW_PANEL * pw_padded_k(k);
    float *values = malloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; ++i) values[i] = 0.5f * ((float)rand() / (float)RAND_MAX - 0.5f);
    return (pw_weight){.kind = PW_F32, .path = -1, .k_parts = 1, .n = n, .k = k, .values = values};
}

/* ---- a program -------------------------------------------------------------------------------------------------- */

static void share_columns(const pw_program *program, pw_op *op) {
    const pw_weight *whole = &op->parts[0].weight;
    for (int table = 0; table < PW_SCHEDULE_TABLES; ++table) {
        pw_column_share *share = &op->shares[table][0];
        pw_range own = pw_share_of(&program->divisions[table], pw_panels(whole->n));
        if (own.begin == own.end) continue;
        int64_t end = own.end * PW_PANEL < whole->n ? own.end * PW_PANEL : whole->n;
        share->weight = *whole;
        share->weight.n = end - own.begin * PW_PANEL;
        share->weight.values = (const float *)whole->values + own.begin * PW_PANEL * pw_padded_k(whole->k);
        share->column = own.begin * PW_PANEL;
    }
}

static void linear(pw_program *program, const pw_weight *weight, pw_source source, pw_epilogue epilogue, int64_t in,
                   int64_t in_stride, int64_t out) {
    pw_op op = {.code = PW_LINEAR, .source = source, .epilogue = epilogue, .n_parts = 1, .norm = norm, .eps = 1e-5f};
    op.parts[0].weight = *weight;
    op.k = weight->k;
    op.in = in;
    op.in_stride = in_stride;
    op.out = out;
    op.out_stride = weight->n;
    share_columns(program, &op);
    must(pw_program_add(program, &op), "no memory");
}

static void add_ops(pw_program *program) {
    int64_t hidden = 0, projected = hidden + TOKENS * HIDDEN, mixed = projected + TOKENS * QKV;
    int64_t gates = mixed + TOKENS * Q, logits = gates + TOKENS * 2 * FFN;
    pw_op embed = {.code = PW_EMBED, .n_parts = 1, .out = hidden, .out_stride = HIDDEN, .k = HIDDEN, .scale = 1};
    embed.parts[0].weight = embedding;
    pw_program_add(program, &embed);
    for (int32_t layer = 0; layer < LAYERS; ++layer) {
        linear(program, &qkv, PW_FROM_NORM, PW_STORE, hidden, HIDDEN, projected);
        pw_op attend = {.code = PW_ATTEND, .layer = layer, .in = projected, .in_stride = QKV, .out = mixed};
        attend.out_stride = Q;
        attend.scale = 0.3f;
        pw_program_add(program, &attend);
        linear(program, &output, PW_FROM_ROWS, PW_ADD, mixed, Q, hidden);
        linear(program, &gate_up, PW_FROM_NORM, PW_STORE, hidden, HIDDEN, gates);
        linear(program, &down, PW_FROM_GATE, PW_ADD, gates, 2 * FFN, hidden);
    }
    linear(program, &head, PW_FROM_NORM, PW_STORE, hidden, HIDDEN, logits);
    program->logits = logits;
    program->arena_floats = logits + TOKENS * VOCAB;
}

/* By table 0 three ranks run a step, by table 1 two of them. */
static pw_program *open_program(int n_ranks, int32_t rank) {
    pw_shape shape = {.n_layers = LAYERS, .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = HEAD_DIM,
                      .hidden = HIDDEN, .ffn = FFN, .vocab = VOCAB, .norm_eps = 1e-5f};
    pw_capacity room = {.kv_slots = SLOTS,
                        .max_tokens = TOKENS,
                        .max_slices = 4,
                        .max_logit_rows = TOKENS,
                        .kv_format = PW_KV_F32,
                        .max_threads = 2};
    double angles[HEAD_DIM / 2] = {1, 0.5, 0.1, 0.01};
    pw_program *program = pw_program_open(shape, room);
    must(program != NULL, "no memory");
    pw_attention_kind kind = {.half = HEAD_DIM / 2, .inv_freq = angles, .magnitude = 1};
    kind.n_kv_heads = KV_HEADS, kind.head_dim = HEAD_DIM;
    must(pw_program_kind(program, kind) == 0, "no memory");
    program->n_ranks = n_ranks;
    program->rank = rank;
    program->patience_ns = PW_GROUP_FOREVER;
    const int32_t *of_three = n_ranks == 1 ? one : three, *of_two = n_ranks == 1 ? one : two;
    program->divisions[0] = pw_division_of(n_ranks, of_three, of_three, rank);
    program->divisions[1] = pw_division_of(n_ranks == 1 ? 1 : 2, of_two, of_two, rank);
    add_ops(program);
    return program;
}

/* ---- ranks ------------------------------------------------------------------------------------------------------ */

typedef struct {
    pw_program *program;
    pw_team *teams[PW_SCHEDULE_TABLES];
} rank_parts;

static pw_team *open_team(int threads) {
    char message[256];
    pw_team *team = pw_team_open(threads, NULL, NULL, 100, message, sizeof message);
    must(team != NULL, "no team");
    return team;
}

static void open_ranks(rank_parts *ranks) {
    for (int32_t i = 0; i < RANKS; ++i) {
        ranks[i].program = open_program(RANKS, i);
        ranks[i].teams[0] = open_team(three[i]);
        ranks[i].teams[1] = i < 2 ? open_team(two[i]) : NULL;
    }
    size_t bytes = (size_t)pw_program_shared_bytes(ranks[0].program);
    char *shared = aligned_alloc(4096, bytes);
    must(shared != NULL, "no memory");
    memset(shared, 0, bytes);
    for (int32_t i = 0; i < RANKS; ++i) {
        must(i == 0 || pw_orders_fit(ranks[i].program, shared), "programs are not alike");
        must(pw_program_seal(ranks[i].program, shared, NULL), "no memory");
        if (i == 0) pw_orders_open(ranks[0].program);
    }
}

static void *serve(void *context) {
    const rank_parts *rank = context;
    must(pw_orders_serve(rank->program, rank->teams) == PW_SERVED, "a rank did not end as it was told");
    return NULL;
}

/* `slices` sequences go on by `tokens` each, all with logits. */
static void fill(pw_step *step, int64_t tokens, int64_t start, int64_t slices) {
    step->n_slices = slices;
    step->n_tokens = step->n_logit_rows = tokens * slices;
    for (int64_t slice = 0; slice < slices; ++slice)
        step->slices[slice] = (pw_slice){.first_row = slice * tokens,
                                         .n_rows = tokens,
                                         .start = start,
                                         .slot_base = slice * SLICE_SLOTS,
                                         .first_run = -1,
                                         .second = tokens};
    for (int64_t row = 0; row < step->n_tokens; ++row) {
        step->tokens[row] = (int32_t)((start * 7 + row * 3) % VOCAB);
        step->logit_rows[row] = row;
    }
}

static void run_step(rank_parts *ranks, rank_parts *alone, int32_t table, int64_t tokens, int64_t start,
                     int64_t slices) {
    pw_program *many = ranks[0].program, *single = alone->program;
    fill(&many->step, tokens, start, slices);
    must(!pw_program_check(many, pw_team_size(ranks[0].teams[table]), table), "a step is refused");
    must(pw_orders_run(many, ranks[0].teams[table], table, NULL) == PW_TEAM_OK, "ranks failed");
    fill(&single->step, tokens, start, slices);
    must(!pw_program_check(single, 1, 0), "a step is refused");
    must(pw_program_run(single, alone->teams[0], 0) == PW_TEAM_OK, "one rank failed");
    must(!memcmp(many->arena + many->logits, single->arena + single->logits,
                 sizeof(float) * (size_t)(VOCAB * tokens * slices)), "logits differ");
}

int main(void) {
    for (int i = 0; i < HIDDEN; ++i) norm[i] = 1.0f + 0.01f * (float)i;
    embedding = random_weight(VOCAB, HIDDEN), qkv = random_weight(QKV, HIDDEN), output = random_weight(HIDDEN, Q);
    gate_up = random_weight(2 * FFN, HIDDEN), down = random_weight(HIDDEN, FFN), head = random_weight(VOCAB, HIDDEN);
    rank_parts ranks[RANKS], alone = {open_program(1, 0), {open_team(1), NULL}};
    pthread_t servers[RANKS];
    open_ranks(ranks);
    must(pw_program_seal(alone.program, NULL, NULL), "no memory");
    for (int i = 1; i < RANKS; ++i) must(!pthread_create(&servers[i], NULL, serve, &ranks[i]), "no thread");

    static const int64_t tokens[] = {12, 1, 3, 1}, slices[] = {1, 1, 2};
    for (int64_t i = 0, start = 0; i < STEPS && start < SLICE_SLOTS - 12; start += tokens[i++ % 4])
        run_step(ranks, &alone, i / 2 % 2, tokens[i % 4], start, slices[i % 3]);

    pw_orders_stop(ranks[0].program);
    for (int i = 1; i < RANKS; ++i) pthread_join(servers[i], NULL);
    return 0;
}
