/* Slots: row operations of the engine that a function of the user's own may compute (decision 0151).
 *
 * One call computes one row of n float32, n >= 1. The engine calls from several threads at once, for any number of rows in
 * any order, and never for a length that was not checked: every n up to 4096, and multiples of 64 up to 32768; all others go
 * to the function that is built in. A function of a slot
 *   - gives the bits of the built-in one, whatever is in the row: zeros of both signs, subnormals, infinities, NaN (of a NaN
 *     the payload is free);
 *   - reads its inputs alone, of which every address is a multiple of 4 and no more than that, and writes y[0..n) alone;
 *   - does not look at what is in y before, except where y is an input: `y may be x` says so;
 *   - keeps nothing from call to call, calls nothing but the pure functions of C's library, and leaves the modes of
 *     floating point as they are.
 * A kernel's text names these arguments, in any order; `n` may be i32 or i64. */
#ifndef PHASEWISE_USER_SLOTS_CONTRACT_H
#define PHASEWISE_USER_SLOTS_CONTRACT_H

#include <stdint.h>

/* rms_norm: y[i] = x[i] * w[i] / sqrt(mean(x^2) + eps), sums in the order of docs/arithmetic.md; y may be x. */
typedef void pw_rms_norm_slot(int64_t n, const float *x, const float *w, float eps, float *y);

/* silu_gate, gelu_gate and so on: y[i] = act(gate[i]) * up[i]; y may be gate or up. */
typedef void pw_gate_slot(int64_t n, const float *gate, const float *up, float *y);

/* silu, gelu and so on: y[i] = act(x[i] + bias[i]); y may be x. A kernel's text takes n, x and y: what calls it adds the bias
 * before, where there is one (else bias is NULL). */
typedef void pw_activation_slot(int64_t n, const float *x, const float *bias, float *y);

/* exponential: y[i] = e^x[i], of which samplers and pooling make a softmax; y may be x. */
typedef void pw_exponential_slot(int64_t n, const float *x, float *y);

/* The name under which a slot's library exports its function. */
#define PW_SLOT_SYMBOL "phasewise_slot"

#endif
