/* How a user's function is called to find out whether it keeps the contract. */
#define _GNU_SOURCE
#include "user_slots/check.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include "user_slots/rows.h"

enum { PW_SLOT_REST = 15 }; /* what no vector of sixteen takes */
enum { N_THREADS = 4, THREAD_CALLS = 120, THREAD_MOST = 512, STACK_BYTES = 256 << 10, SIGNAL_STACK_BYTES = 64 << 10, GUARD_BYTES = 4 << 20 };

static pw_slot_verdict *told;
static char signal_stack[SIGNAL_STACK_BYTES];

/* Safe in a signal handler: memory that is there, and the end. */
static void on_signal(int number) {
    told->outcome = number == SIGPROF ? PW_SLOT_IS_LATE : PW_SLOT_FAULTS;
    told->signal = number;
    _exit(1);
}

static void watch_this_thread(char *memory) {
    stack_t stack = {.ss_sp = memory, .ss_size = SIGNAL_STACK_BYTES};
    sigaltstack(&stack, NULL);
}

static void watch(int seconds) {
    const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGPROF};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    sigfillset(&action.sa_mask);
    for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; ++i) sigaction(numbers[i], &action, NULL);
    struct itimerval limit = {.it_value = {.tv_sec = seconds}};
    setitimer(ITIMER_PROF, &limit, NULL);
    watch_this_thread(signal_stack);
}

/* One range of floats in three views of the same pages: the checker's own, and the candidate's between two pages that cannot be
 * touched, to read alone and to write. */
static bool guard(pw_slot_rows *rows) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = sizeof(float) * PW_SLOT_MOST;
    int fd = memfd_create("phasewise-slot-rows", MFD_CLOEXEC);
    if (fd < 0 || bytes % page || ftruncate(fd, (off_t)bytes)) return false;
    char *own = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *read_only = mmap(NULL, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *writable = mmap(NULL, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED || read_only == MAP_FAILED || writable == MAP_FAILED) return false;
    char *a = mmap(read_only + page, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    char *b = mmap(writable + page, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    close(fd);
    *rows = (pw_slot_rows){(float *)(void *)own, (float *)(void *)a, (float *)(void *)b};
    return a != MAP_FAILED && b != MAP_FAILED;
}

static bool guard_all(pw_slot_place *place) {
    return guard(&place->a) && guard(&place->b) && guard(&place->y);
}

static bool ordinary(pw_slot_place *place) {
    float *memory = calloc(3 * (size_t)PW_SLOT_MOST, sizeof *memory);
    if (!memory) return false;
    pw_slot_rows *rows[] = {&place->a, &place->b, &place->y};
    for (int i = 0; i < 3; ++i) {
        float *own = memory + (size_t)i * PW_SLOT_MOST;
        *rows[i] = (pw_slot_rows){own, own, own};
    }
    return true;
}

static int64_t next_length(int64_t n) { return n < PW_SLOT_EVERY ? n + 1 : n + PW_SLOT_STEP; }

/* Of a recheck: every length that a vector and its rest can have, then some. */
static int64_t next_of_few(int64_t n) { return n < 80 ? n + 1 : n + n / 2 + 1; }

/* Every way to call at a length, then the first of them again. False where the verdict is not that all agree. */
static bool check_length(pw_slot_check *check, int64_t n) {
    for (int trial = 0; trial < pw_slot_trials(); ++trial)
        if (!pw_try_slot(check, trial, n)) return false;
    if (pw_try_slot(check, 0, n)) return true;
    check->verdict->outcome = PW_SLOT_REPEATS;
    return false;
}

typedef struct {
    pw_slot_check *check;
    int number;
    int64_t failed_n;
    pthread_barrier_t *begun;
    float memory[4][THREAD_MOST];
    char signal_stack[SIGNAL_STACK_BYTES];
} slot_thread;

/* Rows of this thread's own, while others call with theirs. */
static void *call_beside_others(void *context) {
    slot_thread *own = context;
    watch_this_thread(own->signal_stack);
    pthread_barrier_wait(own->begun);
    for (int i = 0; i < THREAD_CALLS && !own->failed_n; ++i) {
        int64_t n = 1 + (int64_t)(pw_slot_random(own->check->seed, (uint64_t)(own->number * THREAD_CALLS + i)) % THREAD_MOST);
        float *x = own->memory[0], *w = own->memory[1], *wanted = own->memory[2], *y = own->memory[3];
        pw_slot_plain_rows(own->check, own->number * 1000 + i, n, x, w);
        pw_call_slot(own->check->slot, own->check->built_in, &(pw_slot_call){n, x, w, 1e-5f, wanted});
        pw_call_slot(own->check->slot, own->check->function, &(pw_slot_call){n, x, w, 1e-5f, y});
        if (pw_slot_difference(n, wanted, y) >= 0) own->failed_n = n;
    }
    return NULL;
}

static bool check_threads(pw_slot_check *check) {
    slot_thread *threads = calloc(N_THREADS, sizeof *threads);
    pthread_t handles[N_THREADS];
    pthread_attr_t small;
    pthread_barrier_t begun;
    if (!threads || pthread_attr_init(&small) || pthread_attr_setstacksize(&small, STACK_BYTES) ||
        pthread_attr_setguardsize(&small, GUARD_BYTES)) {
        check->verdict->outcome = PW_SLOT_NO_MEMORY;
        return false;
    }
    pthread_barrier_init(&begun, NULL, N_THREADS);
    int64_t failed_n = 0;
    for (int i = 0; i < N_THREADS; ++i) {
        threads[i].check = check, threads[i].number = i, threads[i].begun = &begun;
        if (pthread_create(&handles[i], &small, call_beside_others, &threads[i])) {
            check->verdict->outcome = PW_SLOT_NO_MEMORY;
            return false; /* the process ends, and the others with it */
        }
    }
    for (int i = 0; i < N_THREADS; ++i) {
        pthread_join(handles[i], NULL);
        if (threads[i].failed_n) failed_n = threads[i].failed_n;
    }
    if (!failed_n) return true;
    check->verdict->outcome = PW_SLOT_THREADS_DIFFER;
    check->verdict->n = failed_n;
    return false;
}

/* Each of the 2^32 floats as an input, in rows of this length. */
static bool check_every_float(pw_slot_check *check, int64_t length) {
    const uint64_t end = (uint64_t)1 << 32;
    const pw_slot_place *place = check->place;
    pw_slot_plain_rows(check, 0, length, place->a.own, place->b.own);
    const float *second = check->slot < PW_SLOT_ACTIVATIONS ? place->b.read_only : NULL;
    for (uint64_t first = 0; first < end; first += (uint64_t)length) {
        int64_t n = end - first < (uint64_t)length ? (int64_t)(end - first) : length;
        for (uint32_t i = 0; i < n; ++i) {
            uint32_t bits = (uint32_t)first + i;
            memcpy(&place->a.own[i], &bits, sizeof bits);
        }
        pw_call_slot(check->slot, check->built_in, &(pw_slot_call){n, place->a.own, second, 0.0f, check->wanted});
        pw_call_slot(check->slot, check->function, &(pw_slot_call){n, place->a.read_only, second, 0.0f, place->y.writable});
        int64_t index = pw_slot_difference(n, check->wanted, place->y.own);
        if (index < 0) continue;
        *check->verdict = (pw_slot_verdict){.outcome = PW_SLOT_DIFFERS, .n = n, .index = index};
        return false;
    }
    return true;
}

void pw_check_slot(int slot, pw_slot_function function, uint64_t seed, int every_float, int seconds,
                   pw_slot_verdict *verdict) {
    told = verdict;
    *verdict = (pw_slot_verdict){.outcome = PW_SLOT_FAULTS};
    pw_slot_place place;
    pw_slot_check check = {.slot = slot, .function = function, .seed = seed, .place = &place, .verdict = verdict};
    if (!guard_all(&place) || !pw_slot_open(&check)) {
        verdict->outcome = PW_SLOT_NO_MEMORY;
        return;
    }
    watch(seconds);
    for (int64_t n = 1; n <= PW_SLOT_MOST; n = next_length(n))
        if (!check_length(&check, n)) return;
    if (!check_threads(&check)) return;
    bool has_all = every_float && slot != PW_SLOT_RMS_NORM; /* whose rows cannot all be tried */
    if (has_all && !(check_every_float(&check, PW_SLOT_EVERY) && check_every_float(&check, PW_SLOT_REST))) return;
    verdict->digest = check.digest;
    verdict->outcome = PW_SLOT_AGREES;
}

void pw_recheck_slot(int slot, pw_slot_function function, uint64_t seed, pw_slot_verdict *verdict) {
    *verdict = (pw_slot_verdict){.outcome = PW_SLOT_NO_MEMORY};
    pw_slot_place place;
    pw_slot_check check = {.slot = slot, .function = function, .seed = seed, .place = &place, .verdict = verdict};
    if (!ordinary(&place)) return;
    bool is_open = pw_slot_open(&check), agrees = is_open;
    for (int64_t n = 1; agrees && n <= PW_SLOT_EVERY; n = next_of_few(n)) agrees = check_length(&check, n);
    if (is_open) pw_slot_close(&check);
    free(place.a.own);
    verdict->digest = check.digest;
    if (agrees) verdict->outcome = PW_SLOT_AGREES;
}

int pw_time_slot(int slot, pw_slot_function function, const int64_t *lengths, int n_lengths, int64_t loops, int64_t calls,
                 int64_t *loop_ns) {
    pw_slot_place place;
    pw_slot_check check = {.slot = slot, .seed = 1, .place = &place};
    if (!ordinary(&place)) return -1;
    if (!pw_slot_open(&check)) {
        free(place.a.own);
        return -1;
    }
    pw_slot_function timed = function ? function : check.built_in;
    pw_slot_plain_rows(&check, 0, PW_SLOT_MOST, place.a.own, place.b.own);
    for (int64_t loop = 0; loop < loops; ++loop) {
        int64_t begun_ns = pw_now_ns();
        for (int64_t call = 0; call < calls; ++call)
            for (int i = 0; i < n_lengths; ++i)
                pw_call_slot(slot, timed, &(pw_slot_call){lengths[i], place.a.own, place.b.own, 1e-5f, place.y.own});
        loop_ns[loop] = pw_now_ns() - begun_ns;
    }
    pw_slot_close(&check);
    free(place.a.own);
    return 0;
}
