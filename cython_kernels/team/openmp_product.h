/* One product y = x W^T + bias on the threads of the OpenMP library that the process has loaded already, for programs
 * whose other work runs there: no thread of ours competes with theirs for a core, and the cores are those that they were
 * given. Which member computes what changes no bit (product.h), nor does it if the library sends fewer than asked for. */
#ifndef PHASEWISE_OPENMP_PRODUCT_H
#define PHASEWISE_OPENMP_PRODUCT_H

#include <stdbool.h>

#include "team/product.h"

/* What is called of the library. Both are of the ABI that GNU's, Intel's and LLVM's have in common. */
typedef struct {
    void (*parallel)(void (*task)(void *context), void *context, unsigned threads, unsigned flags); /* GOMP_parallel */
    int (*member)(void);                                                                            /* omp_get_thread_num */
} pw_openmp;

typedef enum { PW_FLOAT32, PW_BFLOAT16 } pw_number;

/* x[rows][k], bias[n] (NULL: none) and y[rows][n] are of one kind of number, without gaps. Sums are float32, and the bias
 * is added before they are rounded. */
typedef struct {
    const pw_weight *weight;
    const pw_schedule *schedule;
    int64_t rows;
    pw_number number;
    const void *x, *bias;
    void *y;
} pw_openmp_call;

typedef struct pw_openmp_team pw_openmp_team;

/* `threads` of the calling thread's team, at least 1. NULL without memory. */
pw_openmp_team *pw_openmp_open(pw_openmp library, int threads);
void pw_openmp_close(pw_openmp_team *team);

/* The CPU that each member runs on now; -1 for those that the library did not send. */
void pw_openmp_observe(pw_openmp_team *team, int *cpus);

/* Calls of several threads take turns. False without memory for what lies between x and y; it is kept for the next call. */
bool pw_openmp_multiply(pw_openmp_team *team, const pw_openmp_call *call);

#endif
