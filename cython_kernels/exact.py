"""Logarithms and powers that are the same in every bit on every CPU: those of libm and numpy are not."""

from __future__ import annotations

import math
from decimal import Context, Decimal
from functools import lru_cache

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ODD = (
    1.479819860511658591e-01,
    1.818357216161805012e-01,
    2.857142874366239149e-01,
    6.666666666666735130e-01,
)
_EVEN = (1.531383769920937332e-01, 2.222219843214978396e-01, 3.999999999940941908e-01)
_DIGITS = Context(prec=40)


def logarithm(x: float) -> float:
    """ln x within one unit of its last place, by fdlibm's e_log.c (Sun Microsystems 1993).

    Sums, products and quotients of doubles alone. ValueError unless x > 0.
    """
    if not x > 0:
        raise ValueError(f"the logarithm of {x}")
    if x == math.inf:
        return x
    fraction, exponent = math.frexp(x)
    if fraction < math.sqrt(0.5):
        fraction, exponent = 2.0 * fraction, exponent - 1
    f = fraction - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    odd = even = 0.0
    for term in _ODD:
        odd = odd * w + term
    for term in _EVEN:
        even = even * w + term
    half_square = 0.5 * f * f
    low = s * (half_square + (z * odd + w * even)) + exponent * _LN2_LOW
    return exponent * _LN2_HIGH - ((half_square - low) - f)


def softplus(x: float) -> float:
    """ln(1 + e^x), correctly rounded but for ties that 40 digits do not tell; NaN for NaN."""
    if not -200 < x < 80:  # where it is less than float32 has, or x within half a unit of its last place
        return max(x, 0.0) if x == x else x
    return float(_DIGITS.ln(1 + _DIGITS.exp(Decimal(x))))


@lru_cache(maxsize=4096)
def power(base: float, numerator: int, denominator: int) -> float:
    """The base to a rational exponent, correctly rounded but for ties that 40 digits do not tell; base >
    0."""
    exponent = _DIGITS.divide(Decimal(numerator), Decimal(denominator))
    return float(_DIGITS.power(Decimal(base), exponent))
