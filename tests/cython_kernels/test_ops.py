"""Every row operation keeps the bound that its source states, on every usable ISA; `exact` needs no libm."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from decimal import Context, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.exact import logarithm, power
from tests.support.tiers import examples

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 576, 1024, 1025, 4099)
U = 2.0**-24


@pytest.fixture(params=isa.usable(), autouse=True)
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with isa.using(request.param):
        yield request.param


def row(n: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed + n).standard_normal(n) * scale).astype(np.float32)


def exact(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def test_exp_keeps_its_bound_over_the_whole_range() -> None:
    floats = np.arange(0, 0x42B0BE00, 997, dtype=np.uint32).view(np.float32)
    x = np.concatenate([floats[floats <= 88.37], -floats[floats <= 87.3]])

    error = np.abs(_native.exponential(x) - np.exp(exact(x))) / np.exp(exact(x))

    assert error.max() <= 2 * U


def test_exp_ends_as_promised() -> None:
    x = np.float32([0.0, -0.0, -87.7, -1e9, -np.inf, 88.37, 1e9, np.inf, np.nan])
    y = _native.exponential(x)

    assert y[:2].tolist() == [1.0, 1.0]
    assert y[2:5].tolist() == [0.0, 0.0, 0.0]
    assert y[5] == y[6] == y[7] < np.inf
    assert np.isnan(y[8])


def test_no_kernel_reads_or_writes_beyond_its_row() -> None:
    """NaN beyond the row would reach the result; the guard behind the result would change."""
    for n in SIZES:
        padded = np.full(n + 64, np.nan, np.float32)
        padded[:n] = row(n)
        for got in (
            _native.rmsnorm(padded[:n], padded[:n], 1e-5),
            _native.gated("silu", padded[:n], padded[:n]),
            _native.softmax(padded[:n]),
            _native.exponential(padded[:n]),
        ):
            assert np.isfinite(got).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rmsnorm_keeps_its_bound(scale: float) -> None:
    for n in SIZES:
        x, weight, eps = row(n, 1, scale), row(n, 2), 1e-5
        want = exact(x) * exact(weight) / np.sqrt(np.mean(exact(x) ** 2) + np.float64(np.float32(eps)))
        bound = (n / 64 + 16 + 8) * U

        assert (np.abs(_native.rmsnorm(x, weight, eps) - want) <= bound * np.abs(want)).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_layernorm_keeps_its_bound(scale: float, shift: float) -> None:
    """The bound of families/rows/layernorm.c, with and without a bias before the norm."""
    for n in SIZES:
        x, bias = (row(n, 1) + np.float32(shift)) * np.float32(scale), row(n, 2) * np.float32(scale)
        weight, norm_bias, eps = row(n, 3), row(n, 4), 1e-5
        for added in (None, bias):
            t = exact(x) + (0 if added is None else exact(added))
            d, s = t - t.mean(), np.sqrt(t.var() + np.float64(np.float32(eps)))
            g = n / 64 + 16 + 4
            e = U * (2 * np.abs(t) + g * np.abs(t).mean() + np.abs(d))
            bound = (
                np.abs(exact(weight)) / s * (e + np.abs(d) * (np.sqrt(np.mean(e * e)) / s + (g / 2 + 8) * U))
            )
            bound += 4 * U * (np.abs(exact(weight) * d) / s + np.abs(exact(norm_bias)))

            got = _native.layernorm(x, added, weight, norm_bias, eps)

            assert (np.abs(got - (d / s * exact(weight) + exact(norm_bias))) <= bound).all()


def erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(number) for number in x])


def test_gelu_keeps_its_bound_over_the_whole_range() -> None:
    """The bound of families/rows/activations.c; far below zero nothing is left, far above all."""
    x = np.concatenate([np.linspace(-9, 9, 60011), [-1e30, -100.0, 100.0, 1e30]]).astype(np.float32)

    got = _native.activated("gelu", x)

    assert (np.abs(got - exact(x) / 2 * (1 + erf(exact(x) / math.sqrt(2)))) <= 10 * U * np.abs(x)).all()
    assert got[-4:].tolist() == [0.0, 0.0, 100.0, np.float32(1e30)]
    assert np.isnan(_native.activated("gelu", np.float32([np.nan]))).all()


def test_activations_keep_their_bounds_at_every_length() -> None:
    for n in SIZES:
        x, bias = row(n, 4, 4.0), row(n, 5)
        t = exact(x + bias)
        z = 2 * np.sqrt(2 / np.pi) * (t + 0.044715 * t**3)
        wanted = {
            "gelu": (t / 2 * (1 + erf(t / math.sqrt(2))), 10 * np.abs(t)),
            "gelu_tanh": (t / (1 + np.exp(-z)), (9 + 5 * np.abs(z)) * np.abs(t / (1 + np.exp(-z))) + 1e-22),
            "silu": (t / (1 + np.exp(-t)), 7 * np.abs(t / (1 + np.exp(-t)))),
            "relu": (np.maximum(t, 0), 0.0),
        }
        for name, (want, bound) in wanted.items():
            got = _native.activated(name, x, bias)

            assert (np.abs(got - want) <= bound * U).all(), name
            assert (got == _native.activated(name, (x + bias).astype(np.float32))).all()


def test_rope_keeps_its_bound_and_the_length_of_every_pair() -> None:
    for half in (1, 2, 5, 8, 16, 17, 32, 40, 64, 128):
        x, angles = row(2 * half), exact(row(half, 3, 100.0))
        cosine, sine = np.cos(angles), np.sin(angles)
        a, b = exact(x[:half]), exact(x[half:])
        want = np.concatenate([a * cosine - b * sine, b * cosine + a * sine])

        got = _native.rope(x, cosine.astype(np.float32), sine.astype(np.float32))

        bound = 2.0**-23 * np.tile(np.abs(a) + np.abs(b), 2) + U * np.tile(np.abs(a) + np.abs(b), 2)
        assert (np.abs(got - want) <= bound).all()
        assert np.allclose(np.hypot(got[:half], got[half:]), np.hypot(a, b), rtol=1e-6)


@pytest.mark.parametrize("name", ["silu", "logistic", "gelu_tanh", "clamped_silu"])
def test_a_gate_keeps_its_bound(name: str) -> None:
    """Some roundings off, which the logistic passes on times the size of its argument."""
    for n in SIZES:
        gate, up = row(n, 4, 4.0 if name == "gelu_tanh" else 20.0), row(n, 5, 20.0)
        g, u = exact(gate), exact(up)
        below, z = np.minimum(g, 7), 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
        with np.errstate(over="ignore"):
            of_gelu = g / (1 + np.exp(-z)) * u
        want, factor = {
            "silu": (g / (1 + np.exp(-g)) * u, 6),
            "logistic": (u / (1 + np.exp(-g)), 6),
            "gelu_tanh": (of_gelu, 8 + 5 * np.abs(z)),
            "clamped_silu": (
                below / (1 + np.exp(-1.702 * below)) * (np.clip(u, -7, 7) + 1),
                10 + 3 * np.abs(1.702 * below),
            ),
        }[name]

        assert (np.abs(_native.gated(name, gate, up) - want) <= factor * U * np.abs(want) + 1e-30).all()


def test_relu2_rounds_once_and_passes_nans() -> None:
    for n in SIZES:
        x, bias = row(n, 4, 4.0), row(n, 5)
        x[n // 2] = np.nan
        t = x + bias

        got = _native.activated("relu2", x, bias)

        assert np.isnan(got[n // 2])
        assert (np.delete(got, n // 2) == np.delete(np.maximum(t, 0) * np.maximum(t, 0), n // 2)).all()


NUMBERS_OF_XIELU = np.float32([[0.8, 0.8, 0.5, -1e-6], [0.1, 3.0, 0.5, -0.25], [2.0, 0.6, 1.5, -1.5]])
"""alpha_p, alpha_n, beta and eps."""


@pytest.mark.parametrize("numbers", NUMBERS_OF_XIELU)
def test_xielu_keeps_its_bound_at_every_length(numbers: np.ndarray) -> None:
    """The bound of families/rows/activations.c, over small, usual and large numbers, and both zeros."""
    p, n, b, eps = exact(numbers)
    edges = np.float32([0.0, -0.0, 1e-30, -1e-30, -1e-7, -1.0, -87.0, -1e4, 1e4])
    for size in SIZES:
        x = np.concatenate([row(size, 4, 4.0), row(size, 5, 1e-3), edges]).astype(np.float32)
        t = exact(x)
        m = np.minimum(t, eps)
        beyond = np.expm1(m) - m
        want = np.where(t > 0, t * (p * t + b), n * (beyond + (m - t)) + b * t)
        below = 16 * n * (np.abs(beyond) + np.abs(m - t)) + 3 * np.abs(b * t)

        got = _native.activated("xielu", x, numbers)

        assert (np.abs(got - want) <= U * np.where(t > 0, 2 * (p * t * t + np.abs(b * t)), below)).all()


def test_xielu_passes_nans_and_wants_its_numbers() -> None:
    numbers = NUMBERS_OF_XIELU[0]

    assert np.isnan(_native.activated("xielu", np.float32([np.nan, -np.nan]), numbers)).all()
    for too_few in (None, numbers[:3]):
        with pytest.raises(ValueError, match="a row of 2"):
            _native.activated("xielu", np.float32([1, 2]), too_few)


def test_the_gate_of_the_error_function_is_the_activation_times_what_it_gates() -> None:
    for n in SIZES:
        gate, up = row(n, 4, 8.0), row(n, 5, 8.0)

        got = _native.gated("gelu", gate, up)

        assert got.tobytes() == (_native.activated("gelu", gate) * up).tobytes()


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_a_cap_keeps_its_bound(cap: float) -> None:
    for n in SIZES:
        x = row(n, 4, 200.0)

        got = _native.capped(x, cap)

        assert (np.abs(got - cap * np.tanh(exact(x) / cap)) <= 6 * U * cap).all()
        assert (np.abs(got) <= cap).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_softmax_and_logsumexp_keep_their_bound(scale: float) -> None:
    for n in (*SIZES, 49152):
        x = row(n, 6, scale)
        shifted = exact(x) - exact(x).max()
        total = np.exp(shifted).sum()
        bound = (1024 / 16 + 16 + 3 + np.abs(shifted).max() * 1.01 + 4) * U

        got = _native.softmax(x)
        kept = shifted > -87
        want = np.exp(shifted) / total

        assert (np.abs(got - want)[kept] <= bound * want[kept]).all()
        assert abs(_native.logsumexp(x) - (exact(x).max() + math.log(total))) <= 2 * bound


def test_logsumexp_of_infinities() -> None:
    assert _native.logsumexp(np.float32([-np.inf] * 5)) == -np.inf
    assert _native.logsumexp(np.float32([0.0, np.inf])) == np.inf
    assert _native.logsumexp(np.float32([3.0, -np.inf])) == 3.0


# Few distinct values, so that ties are common.
rows = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.just(math.nan), st.just(-math.inf)), min_size=1, max_size=200
)


@examples(60)
@given(values=rows)
def test_argmax_is_numpys(values: list[float]) -> None:
    """The first of the largest; a NaN counts as larger than anything, so that it is noticed."""
    x = np.array(values, np.float32)

    assert _native.argmax(x) == x.argmax()


@examples(60)
@given(values=rows, k=st.integers(0, 210))
def test_top_k_is_a_stable_sort_cut_short(values: list[float], k: int) -> None:
    x = np.array(values, np.float32)
    ranked = np.where(np.isnan(x), -np.inf, x)
    order = np.argsort(-ranked, kind="stable")[:k]

    best, indices = _native.top_k(x, k)

    assert indices.tolist() == order.tolist()
    assert best.tolist() == ranked[order].tolist()


@pytest.mark.parametrize("call", [_native.argmax, _native.softmax, _native.logsumexp])
def test_an_empty_row_is_refused(call: object) -> None:
    with pytest.raises(ValueError, match="empty row"):
        call(np.empty(0, np.float32))  # type: ignore[operator]


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
    """The expected numbers do not depend on the libm, numpy or CPU."""
    frequencies = np.array([power(500000.0, -pair, 128) for pair in range(0, 128, 2)])
    logarithms = np.array([logarithm(1.0 + 7.0 * index) for index in range(64)])

    assert [float(frequencies[index]).hex() for index in (1, 31, 63)] == FREQUENCIES
    assert [float(logarithms[index]).hex() for index in (1, 31, 63)] == LOGARITHMS
