"""Logarithms and powers that owe nothing to libm or numpy: near enough, and the same everywhere."""

from __future__ import annotations

import math
import sys
from decimal import Context, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels.exact import logarithm, power

DIGITS = Context(prec=60)
FREQUENCIES = ["0x1.a115829457fbep-1", "0x1.c7181f3d9f60bp-10", "0x1.4985fec80a8cbp-19"]
LOGARITHMS = ["0x1.0a2b23f3bab73p+1", "0x1.589b912e09c44p+2", "0x1.85d8056754d23p+2"]


@given(st.floats(sys.float_info.min, sys.float_info.max) | st.floats(0.5, 2.0))
def test_a_logarithm_is_within_a_unit_of_its_last_place(x: float) -> None:
    exact = DIGITS.ln(Decimal(x))

    assert abs(Decimal(logarithm(x)) - exact) <= Decimal(math.ulp(float(exact)))


def test_logarithms_at_the_ends() -> None:
    assert logarithm(1.0) == 0.0
    assert logarithm(math.inf) == math.inf
    for x in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="logarithm"):
            logarithm(x)


@given(st.floats(1.0, 1e8), st.integers(0, 255), st.integers(1, 256))
def test_a_power_is_correctly_rounded(base: float, numerator: int, denominator: int) -> None:
    exponent = DIGITS.divide(Decimal(-numerator), Decimal(denominator))

    assert power(base, -numerator, denominator) == float(DIGITS.power(Decimal(base), exponent))


def test_known_bits() -> None:
    """Of another libm, numpy or CPU they would be these too."""
    frequencies = np.array([power(500000.0, -pair, 128) for pair in range(0, 128, 2)])
    logarithms = np.array([logarithm(1.0 + 7.0 * index) for index in range(64)])

    assert [float(frequencies[index]).hex() for index in (1, 31, 63)] == FREQUENCIES
    assert [float(logarithms[index]).hex() for index in (1, 31, 63)] == LOGARITHMS
