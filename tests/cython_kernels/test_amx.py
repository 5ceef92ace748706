"""The tile kernels, on the tile unit where this machine has one and on an emulated one on every x86-64.

The emulated unit (emulated_tiles.h) computes what the instructions compute, and ends the process where a real
one would fault: a tile touched without the system's permission or without a shape, operands that do not fit,
state that was not given back.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa, packing, sparse
from phasewise.cython_kernels.blocks import BLOCKS, BlockRows
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
from tests.support.kernels.gemm_reference import DENSITIES, FORMATS, Array, make_weight, pruned, random_blocks
from tests.support.tiers import examples

TILED = ("bf16", "q8 column")
INT8_DOT, INT8_TILE = map(_native.path_names().index, ("int8_dot", "int8_tile"))
INT8_BLOCK = _native.path_names().index("int8_block")
WITH_SUBS = tuple(fmt for fmt, block in BLOCKS.items() if block.has_subs)
BF16_TILE = _native.path_names().index("bf16_tile")
SHAPES = (
    (1, 1, 1, Walk()),
    (17, 33, 3, Walk(panels=2)),
    (48, 96, 33, Walk(mr=32, panels=2)),
    (95, 577, 21, Walk(mr=17, panels=2, block_n=32)),
    (64, 160, 40, Walk(mr=32, panels=1, block_m=24, block_k=64)),
)

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the tile unit is of x86-64")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """one_product.c with emulated_amx.h in the place of isa/amx.h, on an emulated machine."""
    return link_emulated(
        tmp_path_factory.mktemp("amx"),
        "emulated_amx",
        "emulated_machine",
        "-Wl,--wrap=syscall,--wrap=pw_cpu_features",
    )


def _on_the_real_unit(w: PackedWeight, x: Array, walk: Walk, path: int = -1, k_parts: int = 1) -> Array:
    return product_here("amx", w, x, walk, None if path < 0 else _native.path_names()[path], k_parts)


@pytest.fixture(params=[pytest.param("emulated", marks=pytest.mark.slow), "real"])
def multiply(request: pytest.FixtureRequest) -> Product:
    """A product by the tile kernels, on one of the two units."""
    if request.param == "emulated":
        program = request.getfixturevalue("program")
        return lambda w, x, walk, **how: product([program, "amx"], w, x, walk, **how)
    if "amx" not in isa.usable():
        pytest.skip("this machine has no tile unit")
    return _on_the_real_unit


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_keep_their_bound(multiply: Product, fmt: str) -> None:
    assert_bound(multiply, fmt, SHAPES, path="bf16_tile" if fmt == "bf16" else None)


@pytest.mark.parametrize("fmt", TILED)
@pytest.mark.parametrize("k_parts", [1, 3])
def test_the_walk_changes_no_bit(multiply: Product, fmt: str, k_parts: int) -> None:
    walks = [
        Walk(mr, panels, 35, 48, block_k)
        for mr, panels, block_k in ((32, 2, 64), (17, 1, 352), (16, 2, 32), (5, 4, 96))
    ]
    assert_no_walk_changes_a_bit(multiply, fmt, walks, k_parts=k_parts)


@pytest.mark.parametrize("k_parts", [1, 2])
def test_int8_tiles_and_dots_give_the_same_bits(multiply: Product, k_parts: int) -> None:
    """Sums of bytes are exact on either, and meet their scales in the same way; 32 inputs are half a tile."""
    rng = np.random.default_rng(5)
    for n, k, m in ((16, 32, 1), (40, 64, 17), (75, 224, 32), (33, 1000, 35)):
        w = make_weight("q8 column", n, k, rng)
        x = rng.standard_normal((m, k), dtype=np.float32)
        walk = Walk(mr=32, panels=2, block_k=96)
        tiles = multiply(w, x, walk, path=INT8_TILE, k_parts=k_parts)

        assert np.array_equal(multiply(w, x, walk, k_parts=k_parts), tiles)  # the default
        assert np.array_equal(multiply(w, x, walk, path=INT8_DOT, k_parts=k_parts), tiles)


@pytest.mark.parametrize("fmt", TILED)
def test_sparse_storage_changes_no_bit(multiply: Product, fmt: str) -> None:
    """A pass expands its panels into L1 for the tile unit: at any density, and where x is not finite."""
    rng = np.random.default_rng(6)
    walks = (Walk(mr=1), Walk(mr=32, panels=2, block_k=96))
    for density, special in zip(DENSITIES, (1.0, np.nan, np.inf, 1.0), strict=True):
        w = pruned(make_weight(fmt, 75, 352, rng), density, rng)
        for m, walk in ((1, walks[0]), (19, walks[0]), (33, walks[1])):
            x = rng.standard_normal((m, 352), dtype=np.float32)
            x[m // 2, 7] = special
            wanted = multiply(w, x, walk, k_parts=2)
            products = multiply(sparse.to_sparse(w), x, walk, k_parts=2)
            assert np.array_equal(products, wanted, equal_nan=True)


@examples(40)
@given(
    n=st.integers(1, 90),
    k=st.integers(600, 2000),
    m=st.one_of(st.integers(1, 40), st.integers(1, 280)),
    mr=st.integers(1, 32),
    panels=st.sampled_from((1, 2)),
    block_m=st.integers(1, 400),
    block_n=st.integers(16, 128),
    block_k=st.integers(650, 2500),
    loop_order=st.sampled_from(("nm", "mn")),
    k_parts=st.sampled_from((1, 1, 2, 3)),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_passes_that_outgrow_l1_have_the_bits_of_others(
    program: str, n: int, k: int, m: int, k_parts: int, threads: int, seed: int, **walk: Any
) -> None:
    """Part sums then stay in L1, for a few tiles of rows: with few rows and many, any k, several threads."""
    rng = np.random.default_rng(seed)
    w, x = make_weight("bf16", n, k, rng), rng.standard_normal((m, k), dtype=np.float32)
    by_blocks = Walk(mr=32, panels=2, block_m=256, block_n=512, block_k=512)

    wanted = product([program, "amx"], w, x, by_blocks, BF16_TILE, k_parts)
    got = product([program, "amx", str(threads)], w, x, Walk(**walk), BF16_TILE, k_parts)

    assert np.array_equal(bits(got), bits(wanted))


def weight_of(fmt: str, n: int, k: int, rng: np.random.Generator, *, is_tiny: bool = False) -> PackedWeight:
    """is_tiny: with values around 2^-126 where its numbers can be so small, else with subnormal scales."""
    if fmt in BLOCKS:
        inputs = BLOCKS[fmt].inputs
        rows = random_blocks(fmt, n, -(-k // inputs) * inputs, rng)
        return packing.pack_blocks(tiny_blocks(rows, rng) if is_tiny else rows)
    w = make_weight(fmt, n, k, rng)
    return tiny(w, rng) if is_tiny else w


def tiny_blocks(rows: BlockRows, rng: np.random.Generator) -> BlockRows:
    if rows.format.scaling == "exponent":
        return replace(rows, scales=rng.integers(0, 9, rows.scales.shape, dtype=np.uint8))
    small = np.float16(2.0**-15)
    return replace(rows, scales=rows.scales * small, mins=None if rows.mins is None else rows.mins * small)


def tiny(w: PackedWeight, rng: np.random.Generator) -> PackedWeight:
    if w.kind == "bf16":
        rows = rng.standard_normal((w.n, w.k)) * np.exp2(rng.integers(-134, -118, (w.n, w.k)))
        return packing.pack_dense(rows.astype(np.float32), "bf16")
    if w.scales is None or w.scales.dtype != np.float32:
        return w
    small = np.float32(2.0**-124)
    return replace(w, scales=w.scales * small, mins=None if w.mins is None else w.mins * small)


@pytest.mark.parametrize("fmt", WITH_SUBS)
@pytest.mark.parametrize("k_parts", [1, 2])
def test_blocks_on_tiles_have_the_bits_of_vectors(multiply: Product, fmt: str, k_parts: int) -> None:
    """Codes times sub-scales are exact on either; by any walk, and by every instruction set that is here."""
    rng = np.random.default_rng(8)
    walks = (
        Walk(mr=9, block_k=256),
        Walk(mr=16, block_k=4096),
        Walk(mr=23, block_m=30, block_n=32),
        Walk(mr=32, panels=2, block_k=512),
    )
    for n, blocks, m in ((1, 1, 9), (17, 3, 16), (40, 9, 33), (75, 2, 70)):
        w = weight_of(fmt, n, 256 * blocks, rng)
        x = rng.standard_normal((m, w.k), dtype=np.float32)
        x[0] = np.where(rng.random(w.k) < 0.5, -1, 1)  # the largest bytes
        x[m // 2, 7] = np.inf
        wanted = multiply(w, x, Walk(mr=8), path=INT8_BLOCK, k_parts=k_parts)
        for walk in walks:
            tiles = multiply(w, x, walk, path=INT8_BLOCK, k_parts=k_parts)
            assert np.array_equal(bits(tiles), bits(wanted)), walk
        for name in isa.usable():
            here = product_here(name, w, x, Walk(mr=8), "int8_block", k_parts)
            assert np.array_equal(bits(here), bits(wanted)), name


@pytest.mark.slow
def test_a_sum_is_tiny_where_its_rounding_to_24_bits_is(program: str) -> None:
    """2^-126 (1 - 0.75 2^-24) is rounded to 2^-126 in the bits of a subnormal, and is none: it is zero."""
    x = np.zeros((1, 32), np.float32)
    row = np.zeros((1, 32), np.float32)
    x[0, [0, 2]] = 2.0**-63, 2.0**-75
    row[0, [0, 2]] = 2.0**-63, -1.5 * 2.0**-76
    w = packing.pack_dense(row, "bf16")

    assert product([program, "amx"], w, x, Walk(), BF16_TILE)[0, 0] == 0


def bits(y: Array) -> Array:
    """As integers, so that zeros have signs; one NaN is any other."""
    return np.where(np.isnan(y), np.float32(np.nan), y).view(np.int32)


@pytest.mark.slow
def test_without_the_systems_permission_the_rung_is_not_usable(program: str) -> None:
    environment = os.environ | {"REFUSE_TILES": "1"}
    status = [
        subprocess.run([program, name], env=environment, stdin=subprocess.DEVNULL).returncode
        for name in ("amx", "portable")
    ]

    assert status == [3, 1]  # one_product.c: kernels that do not run here; kernels that do, without operands
