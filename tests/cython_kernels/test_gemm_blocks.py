"""Weights in blocks: packing loses nothing, products keep the bound of groups and the laws of products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.cython_kernels.errors import WeightError
from tests.support.kernels import core
from tests.support.kernels.gemm_reference import assert_bound_and_bits, random_blocks
from tests.support.tiers import examples

WAYS = [(name, kind) for name in isa.usable() for kind in BLOCKS]
SIZES = (0, 1, 2, 3, 4, 6, 8, 31)


def paths_on(name: str, kind: str) -> tuple[str, ...]:
    with isa.using(name):
        return tuple(_native.compute_paths(kind))


PATHS = [(name, kind, path) for name, kind in WAYS for path in paths_on(name, kind)]


def whole(kind: str, k: int) -> int:
    inputs = BLOCKS[kind].inputs
    return -(-k // inputs) * inputs


@pytest.mark.parametrize("kind", BLOCKS)
@given(n=st.integers(1, 40), k=st.integers(1, 600), seed=st.integers(0, 2**32 - 1))
@examples(20)
def test_packed_blocks_are_the_rows_again(kind: str, n: int, k: int, seed: int) -> None:
    rows = random_blocks(kind, n, whole(kind, k), np.random.default_rng(seed))

    packed = packing.pack_blocks(rows)
    again = packing.unpack_blocks(packed)

    for name in ("codes", "scales", "mins", "sub_scales", "sub_mins"):
        assert np.array_equal(getattr(again, name), getattr(rows, name)), name
    assert packed.values.shape == packing.values_shape(packed.kind, n, packed.k)


@pytest.mark.parametrize(("name", "kind"), WAYS)
def test_a_row_is_unpacked_to_the_numbers_that_packing_says(name: str, kind: str) -> None:
    weight = packing.pack_blocks(random_blocks(kind, 21, whole(kind, 300), np.random.default_rng(1)))
    expected_rows = packing.unpack(weight)

    with isa.using(name):
        got = np.stack([_native.unpack_row(weight, row) for row in range(21)])

    assert np.array_equal(got, expected_rows)


@pytest.mark.parametrize(("name", "kind", "path"), PATHS)
@examples(5)
@given(
    n=st.integers(1, 100),
    k=st.integers(1, 1300),
    m=st.sampled_from((1, 2, 4, 5, 6, 7, 8, 9, 13, 19, 26)),
    fields=st.fixed_dictionaries(
        {
            "mr": st.sampled_from(SIZES),
            "panels": st.sampled_from(SIZES),
            "block_k": st.sampled_from((1, 32, 320, 1000)),
            "prefetch_bytes": st.sampled_from((0, 2048, 16384)),
        }
    ),
    k_parts=st.sampled_from((1, 1, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_keep_their_bound_and_their_bits(
    name: str, kind: str, path: str, n: int, k: int, m: int, fields: dict[str, int], k_parts: int, seed: int
) -> None:
    """A few rows meet the blocks as they are, many are unpacked for; any schedule, the same bits."""
    rng = np.random.default_rng(seed)
    k = whole(kind, k)
    w = packing.pack_blocks(random_blocks(kind, n, k, rng))
    x = rng.standard_normal((m, k), dtype=np.float32)
    assert_bound_and_bits(name, w, x, path, k_parts, **fields)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_product_is_that_of_the_same_numbers_in_wide_groups(kind: str) -> None:
    """Storage changes no bit: bytes with float32 scales, or float32, say the same and give the same."""
    rng = np.random.default_rng(3)
    rows = random_blocks(kind, 50, 768, rng)
    x = rng.standard_normal((7, 768), dtype=np.float32)

    narrow = _native.gemm(x, packing.pack_blocks(rows))
    is_float = BLOCKS[kind].is_float
    plain = packing.pack_dense(packing.numbers(rows), "f32") if is_float else None
    wide = _native.gemm(x, plain or packing.pack_quant(packing.widened(rows)))

    assert np.array_equal(narrow, wide)


@pytest.mark.parametrize(("name", "kind"), WAYS)
def test_rows_have_the_same_bits_however_many_there_are(name: str, kind: str) -> None:
    """By the defaults of every kind of core: by one tile, by several, and by way of unpacked weights."""
    weight = packing.pack_blocks(random_blocks(kind, 33, 512, np.random.default_rng(5)))
    x = np.random.default_rng(6).standard_normal((68, 512), dtype=np.float32)

    with isa.using(name):
        alone = np.concatenate([_native.gemm(row[None], weight) for row in x])
        for traits in core.names():
            with core.using(traits):
                for m in (*range(1, 28), 64, 65, 68):
                    assert np.array_equal(_native.gemm(x[:m], weight), alone[:m]), (traits, m)


@pytest.mark.parametrize("name", isa.usable())
def test_large_exponents_are_scaled_alike_by_few_rows_and_by_many(name: str) -> None:
    """The offset that takes the float bias off such a scale is not finite: sums are scaled in two steps."""
    rows = random_blocks("mxfp4", 16, 256, np.random.default_rng(7))
    exponents = np.arange(238, 238 - rows.scales.size, -1, dtype=np.uint8).reshape(rows.scales.shape)
    weight = packing.pack_blocks(replace(rows, scales=exponents))
    x = np.full((40, 256), 2.0**-60, np.float32)

    with isa.using(name):
        many, single = _native.gemm(x, weight), _native.gemm(x[:1], weight)

    assert np.isfinite(single).all()
    assert np.array_equal(many, np.repeat(single, 40, axis=0))


@pytest.mark.parametrize("kind", BLOCKS)
def test_damaged_weights_are_refused(kind: str) -> None:
    weight = packing.pack_blocks(random_blocks(kind, 20, 512, np.random.default_rng(4)))
    x = np.zeros((1, 512), np.float32)

    for damaged in (
        replace(weight, k=512 + 16),
        replace(weight, n=1000),
        replace(weight, values=weight.values[..., :-1]),
        replace(weight, group=64),
        replace(weight, zero_point=7),
        replace(weight, scales=np.ones((2, 16, 16), np.float32)),
    ):
        with pytest.raises((WeightError, ValueError)):
            _native.gemm(x[:, : damaged.k], damaged)
