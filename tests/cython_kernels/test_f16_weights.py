"""A weight kept in float16 gives, bit for bit, what the same numbers give as a float32 weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa, packing
from tests.support.tiers import examples

pytestmark = pytest.mark.parametrize("name", isa.usable())

EVERY_FINITE = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
EVERY_FINITE = EVERY_FINITE[np.isfinite(EVERY_FINITE)]


def both_kinds(w: np.ndarray) -> tuple[packing.PackedWeight, packing.PackedWeight]:
    rows = w.astype(np.float32)
    return packing.pack_dense(rows, "f16"), packing.pack_dense(rows, "f32")


def test_every_number_is_itself(name: str) -> None:
    """Subnormal ones and both zeros included, in panels and in a product with 1."""
    matrix = EVERY_FINITE.reshape(-1, 31)
    half, _ = both_kinds(matrix)
    identity = np.eye(31, dtype=np.float32)
    with isa.using(name):
        products = _native.gemm(identity, half).T

    assert half.values.nbytes == 2 * packing.padded_n(half.n) * packing.padded_k(half.k)
    assert np.array_equal(packing.unpack(half).view(np.uint32), matrix.astype(np.float32).view(np.uint32))
    assert np.array_equal(products, matrix.astype(np.float32))


@examples(60)
@given(
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    m=st.integers(1, 40) | st.sampled_from((63, 64, 65, 130)),
    k_parts=st.sampled_from((1, 1, 2, 7)),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_have_the_bits_of_float32_weights(
    name: str, n: int, k: int, m: int, k_parts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    half, single = both_kinds(rng.choice(EVERY_FINITE, (n, k)))
    x = rng.standard_normal((m, k), dtype=np.float32)
    with isa.using(name):
        assert np.array_equal(
            _native.gemm(x, half, k_parts=k_parts).view(np.uint32),
            _native.gemm(x, single, k_parts=k_parts).view(np.uint32),
        )
