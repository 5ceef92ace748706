#ifndef PHASEWISE_PROGRAM_EXACT_H
#define PHASEWISE_PROGRAM_EXACT_H

/* The same bits on every CPU and with every libm: sums, products and quotients of double alone, none of them fused. */

/* The cosine and sine of an angle in radians: within 2^-51 up to 2^25; beyond, as libm has them. */
void pw_cosine_sine(double angle, double *cosine, double *sine);

/* exp(x) for x <= 0, within a unit of its last place; 0 below -708; NaN stays NaN. */
double pw_exponential(double x);

/* ln(1 + e^x), within some units of the last place of float32 and far less. NaN stays NaN. */
double pw_softplus(double x);

/* 1 / (1 + e^-x) */
double pw_logistic(double x);

#endif
