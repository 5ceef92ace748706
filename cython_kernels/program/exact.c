/* Polynomials and constants are those of fdlibm's k_cos.c, k_sin.c, e_exp.c and e_log.c (Sun Microsystems 1993). Cosines and sines:
 * whole quarter turns off, in three steps (Cody and Waite 1980), then the polynomials within an eighth of a turn. pi / 2 is cut
 * into parts of which two have 28 bits, so that their products with up to 2^25 quarter turns are exact. */
#include "program/exact.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static const double QUARTERS_PER_RADIAN = 0x1.45f306dc9c883p-1;
static const double QUARTER_TURN[3] = {0x1.921fb54p+0, 0x1.10b461p-30, 0x1.a62633145c06ep-58};
enum { MOST_QUARTERS = 1 << 25 };

static const double COSINE[6] = {4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05,
                                 -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11};
static const double SINE[6] = {-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
                               2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10};

static double polynomial(const double *terms, double x) {
    double sum = terms[5];
    for (int i = 4; i >= 0; --i) sum = sum * x + terms[i];
    return sum;
}

void pw_cosine_sine(double angle, double *cosine, double *sine) {
    double turns = rint(angle * QUARTERS_PER_RADIAN);
    if (!(fabs(turns) < MOST_QUARTERS)) {
        *cosine = cos(angle);
        *sine = sin(angle);
        return;
    }
    double r = ((angle - turns * QUARTER_TURN[0]) - turns * QUARTER_TURN[1]) - turns * QUARTER_TURN[2], square = r * r;
    double c = 1.0 - (0.5 * square - square * square * polynomial(COSINE, square));
    double s = r + r * square * polynomial(SINE, square);
    unsigned quadrant = (unsigned)(int32_t)turns & 3u;
    *cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
    *sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
}

static const double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;

double pw_exponential(double x) {
    if (!(x >= -708.0)) return x < -708.0 ? 0.0 : x;
    double n = rint(x * 1.44269504088896338700), high = x - n * LN2_HIGH, low = n * LN2_LOW, r = high - low, square = r * r;
    double even = 4.13813679705723846039e-08;
    even = even * square - 1.65339022054652515390e-06;
    even = even * square + 6.61375632143793436117e-05;
    even = even * square - 2.77777777770155933842e-03;
    even = even * square + 1.66666666666666019037e-01;
    double c = r - square * even, y = 1.0 - ((low - r * c / (2.0 - c)) - high);
    int64_t bits = ((int64_t)n + 1023) * (INT64_C(1) << 52); /* 2^n, normal since n >= -1022 */
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return y * scale;
}

static const double LOGARITHM[7] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                                    2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                                    1.479819860511658591e-01};

/* ln(1 + y), 0 <= y <= 1: fdlibm's e_log.c with at most one halving. */
static double logarithm_of_one_and(double y) {
    bool halves = 1.0 + y > 1.41421356237309504880;
    double f = halves ? (y - 1.0) * 0.5 : y, s = f / (2.0 + f), z = s * s, sum = LOGARITHM[6];
    for (int i = 5; i >= 0; --i) sum = sum * z + LOGARITHM[i];
    double log = f - s * (f - z * sum);
    return halves ? LN2_HIGH + (LN2_LOW + log) : log;
}

double pw_softplus(double x) {
    if (x != x) return x;
    return (x > 0.0 ? x : 0.0) + logarithm_of_one_and(pw_exponential(x > 0.0 ? -x : x));
}

double pw_logistic(double x) {
    if (x != x) return x;
    double e = pw_exponential(x > 0.0 ? -x : x);
    return (x > 0.0 ? 1.0 : e) / (1.0 + e);
}
