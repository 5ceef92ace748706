"""The float16 kernels, on the instructions where this machine has them and on emulated ones on every x86-64.

The emulated words (emulated_f16.h) round as the instructions do, so both give the same bits.
"""

from __future__ import annotations

import platform
from dataclasses import replace

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels.errors import WeightError
from phasewise.cython_kernels.packing import PackedWeight
from tests.support.kernels.cross import (
    Product,
    Walk,
    assert_bound,
    assert_no_walk_changes_a_bit,
    link_emulated,
    product,
    product_here,
)
from tests.support.kernels.gemm_reference import Array, expected, make_weight

NAME, PATH = "avx512_fp16", "f16_fma"
HERE_TOO = NAME in isa.usable()
SHAPES = (
    (1, 1, 1, Walk()),
    (17, 33, 3, Walk(panels=2)),
    (48, 96, 33, Walk(mr=14, panels=2)),
    (95, 577, 21, Walk(mr=9, panels=3, block_n=32)),
    (64, 160, 40, Walk(mr=6, panels=4, block_m=24, block_k=64)),
)

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the rung is one of x86-64")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """one_product.c with emulated_fp16.h in the place of isa/avx512_fp16.h, on an emulated machine."""
    return link_emulated(
        tmp_path_factory.mktemp("f16"), "emulated_fp16", "emulated_fp16_machine", "-Wl,--wrap=pw_cpu_features"
    )


def _on_the_instructions(w: PackedWeight, x: Array, walk: Walk, k_parts: int = 1) -> Array:
    return product_here(NAME, w, x, walk, PATH, k_parts)


@pytest.fixture(params=[pytest.param("emulated", marks=pytest.mark.slow), "real"])
def multiply(request: pytest.FixtureRequest) -> Product:
    """A product by the float16 kernels, on either kind of instructions."""
    if request.param == "emulated":
        program = request.getfixturevalue("program")
        return lambda w, x, walk, **how: product([program, NAME], w, x, walk, **how)
    if not HERE_TOO:
        pytest.skip("this machine has no float16 instructions")
    return _on_the_instructions


@pytest.mark.parametrize("k_parts", [1, 3])
def test_products_keep_their_bound(multiply: Product, k_parts: int) -> None:
    assert_bound(multiply, "bf16", SHAPES, k_parts, PATH)


@pytest.mark.parametrize("weights", [1.0, 2.0**-126, 2.0**-100, 2.0**100, 2.0**120])
@pytest.mark.parametrize("rows", [1.0, 2.0**-149, 2.0**-120, 2.0**100, 2.0**126])
def test_any_scale_of_both_keeps_the_bound(multiply: Product, weights: float, rows: float) -> None:
    """Outliers of 2^12 beside ordinary numbers, all of one sign: unscaled float16 would overflow."""
    rng = np.random.default_rng(4)
    matrix = np.abs(rng.standard_normal((20, 130)))
    x = np.abs(rng.standard_normal((3, 130)))
    matrix[3], x[:, 5] = 1.0, x[:, 5] * 2.0**12
    w = packing.pack_dense((matrix / 4 * weights).astype(np.float32), "bf16")
    x = np.minimum(x / 2**14 * 3 * rows, 3e38).astype(np.float32)
    got = multiply(w, x, Walk())
    exact, bound = expected(x, w, path=PATH)
    small = np.abs(exact) + bound < np.finfo(np.float32).max

    assert (np.abs(got.astype(np.float64) - exact) <= bound)[small].all()
    assert np.isinf(got[np.abs(exact) - bound > np.finfo(np.float32).max]).all()


@pytest.mark.parametrize("k_parts", [1, 3])
def test_the_walk_changes_no_bit(multiply: Product, k_parts: int) -> None:
    walks = [
        Walk(mr, panels, 35, 48, block_k)
        for mr, panels, block_k in ((14, 2, 64), (9, 3, 352), (6, 4, 32), (5, 1, 96), (32, 8, 1))
    ]
    assert_no_walk_changes_a_bit(multiply, "bf16", walks, k_parts=k_parts)


@pytest.mark.skipif(not HERE_TOO, reason="this machine has no float16 instructions to compare with")
@pytest.mark.slow
def test_emulated_and_real_instructions_give_the_same_bits(program: str) -> None:
    rng = np.random.default_rng(6)
    for n, k, m, walk in SHAPES:
        w = make_weight("bf16", n, k, rng)
        x = rng.standard_normal((m, k), dtype=np.float32) * np.exp2(rng.integers(-20, 1, (m, k)))
        x = x.astype(np.float32)

        assert np.array_equal(product([program, NAME], w, x, walk), _on_the_instructions(w, x, walk))


def test_rows_that_are_not_finite_spoil_themselves_alone(multiply: Product) -> None:
    w = make_weight("bf16", 16, 40, np.random.default_rng(7))
    x = np.ones((5, 40), np.float32)
    x[1, 32], x[2, 0], x[3, 1] = np.nan, np.inf, -np.inf
    y, weights = multiply(w, x, Walk()), packing.unpack(w)

    assert np.isfinite(y[[0, 4]]).all()
    assert np.isnan(y[1]).all()
    assert np.array_equal(y[2], np.inf * weights[:, 0])
    assert np.array_equal(y[3], -np.inf * weights[:, 1])


@pytest.mark.skipif(not HERE_TOO, reason="this machine has no float16 instructions")
def test_a_weight_that_is_not_finite_goes_another_way() -> None:
    w = packing.pack_dense(np.full((16, 32), np.inf, np.float32), "bf16")
    with isa.using(NAME):
        assert np.isinf(_native.gemm(np.ones((1, 32), np.float32), w)).all()
        with pytest.raises(WeightError, match="not finite"):
            _native.gemm(np.ones((1, 32), np.float32), w, path=PATH)
        with pytest.raises(WeightError, match="top_exponent"):
            _native.gemm(np.ones((1, 32), np.float32), replace(w, top_exponent=256))
