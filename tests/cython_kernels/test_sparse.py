"""Sparse storage: the weight again, products with the dense weight's bits, nothing believed unchecked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa, packing, sparse
from phasewise.cython_kernels.division import columns
from phasewise.cython_kernels.errors import WeightError
from phasewise.cython_kernels.packing import PANEL, SPARSE_TAIL, PackedWeight, QuantRows
from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS
from tests.support.kernels.gemm_reference import DENSITIES, quantise_columns
from tests.support.tiers import examples

FORMATS = ("bf16", "q8", "q8g16", "q8c")
SIZES = (0, 1, 2, 3, 4, 6, 8, 31)


def pruned(fmt: str, n: int, k: int, density: float, rng: np.random.Generator) -> PackedWeight:
    """A random dense weight of which about `density` is not zero; below 1 its third panel is empty."""
    w = rng.standard_normal((n, k), dtype=np.float32)
    w[rng.random((n, k)) >= density] = 0
    if density < 1:
        w[2 * PANEL : 3 * PANEL] = 0
    if fmt == "bf16":
        return packing.pack_dense(w, "bf16")
    if fmt == "q8":
        return packing.pack_quant(packing.quantise(w, 8, symmetric=True))
    if fmt == "q8c":
        return packing.pack_quant(quantise_columns(w))
    groups = packing.groups_of(k, 16)
    q = np.where(w == 0, 32, rng.integers(0, 64, (n, k))).astype(np.uint8)
    return packing.pack_quant(QuantRows(q, rng.random((n, groups), dtype=np.float32), None, 32, 16, 8))


@contextmanager
def expanding(native: bool) -> Iterator[None]:
    _native.let_expand(native)
    try:
        yield
    finally:
        _native.let_expand(True)


WAYS = [(name, False) for name in isa.usable()]
WAYS += [(name, True) for name in isa.usable() if name.startswith(("avx512", "amx"))]


@pytest.mark.parametrize("fmt", FORMATS)
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    density=st.sampled_from((*DENSITIES, 0.9)),
    seed=st.integers(0, 2**32 - 1),
)
@examples(20)
def test_a_sparse_weight_is_the_weight_again(fmt: str, n: int, k: int, density: float, seed: int) -> None:
    dense = pruned(fmt, n, k, density, np.random.default_rng(seed))

    stored = sparse.to_sparse(dense)

    assert np.array_equal(packing.to_dense(stored).values, dense.values)
    assert sparse.kept(stored) == sparse.kept(dense)
    assert stored.offsets is not None
    assert stored.offsets.shape == packing.offsets_shape(n, k)
    assert not stored.values[-SPARSE_TAIL:].any()


def test_packed_bytes_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(5)
    for fmt, bits in (("bf16", 16), ("q8", 8)):
        for density in (0.7, 0.5, 0.3, 0.1):
            stored = sparse.to_sparse(pruned(fmt, 512, 1024, density, rng))
            scales = 0 if stored.scales is None else stored.scales.nbytes
            per_weight = 8 * (stored.nbytes - scales - SPARSE_TAIL) / (512 * 1024)
            assert per_weight == pytest.approx(bits * sparse.density(stored) + 1, rel=0.02)


@pytest.mark.parametrize(("name", "native"), WAYS)
@pytest.mark.parametrize("fmt", FORMATS)
@examples(3)
@given(
    shape=st.tuples(
        st.integers(1, 150), st.integers(1, 1300), st.sampled_from((1, 2, 3, 4, 5, 8, 9, 14, 16, 17, 33, 70))
    ),
    density=st.sampled_from(DENSITIES),
    walk=st.fixed_dictionaries(
        {
            "mr": st.sampled_from(SIZES),
            "panels": st.sampled_from(SIZES),
            "block_m": st.sampled_from((1, 7, 64)),
            "block_n": st.sampled_from((16, 48, 640)),
            "block_k": st.sampled_from((1, 32, 320, 1000)),
            "prefetch_bytes": st.sampled_from((0, 2048, 16384)),
            "loop_order": st.sampled_from(("nm", "mn")),
        }
    ),
    k_parts=st.sampled_from((1, 1, 3)),
    special=st.sampled_from((None, np.nan, np.inf)),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_have_the_bits_of_the_dense_weight(
    name: str,
    native: bool,
    fmt: str,
    shape: tuple[int, int, int],
    density: float,
    walk: dict[str, Any],
    k_parts: int,
    special: float | None,
    seed: int,
) -> None:
    """Any schedule, part of k and range of panels; NaN and infinity in x meet the zeros as they would."""
    rng, (n, k, m) = np.random.default_rng(seed), shape
    dense = pruned(fmt, n, k, density, rng)
    stored = sparse.to_sparse(dense)
    x = rng.standard_normal((m, k), dtype=np.float32)
    if special is not None:
        x[rng.integers(m), rng.integers(k)] = special
    part = int(rng.integers(k_parts))
    first = int(rng.integers(dense.panels))
    with isa.using(name), expanding(native):
        for path in _native.compute_paths(dense.kind, dense.group):
            prepared = _native.prepare_rows(x, dense, path)
            got, wanted = np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)
            schedule = _native.default_schedule(stored, m, path=path) | walk
            _native.gemm_share(prepared, dense, wanted, path=path, k_parts=k_parts)
            _native.gemm_share(prepared, stored, got, schedule=schedule, path=path, k_parts=k_parts)
            assert np.array_equal(bits(got), bits(wanted)), path
            _native.gemm_share(prepared, stored, got, path=path, k_parts=k_parts)
            assert np.array_equal(bits(got), bits(wanted)), path
            some = {
                "panels": (first, dense.panels),
                "add": True,
                "path": path,
                "k_parts": k_parts,
                "part": part,
            }
            _native.gemm_share(prepared, dense, wanted, **some)
            _native.gemm_share(prepared, stored, got, **some)
            assert np.array_equal(bits(got), bits(wanted)), path


def bits(y: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers, every NaN the same."""
    return np.where(np.isnan(y), np.float32(np.nan), y).view(np.uint32)


@pytest.mark.parametrize(("name", "native"), WAYS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_and_ranges_of_panels_are_those_of_the_dense_weight(name: str, native: bool, fmt: str) -> None:
    rng = np.random.default_rng(1)
    dense = pruned(fmt, 5 * PANEL + 3, 200, 0.4, rng)
    stored = sparse.to_sparse(dense)
    x = rng.standard_normal((3, 200), dtype=np.float32)

    with isa.using(name), expanding(native):
        for row in range(0, dense.n, 7):
            assert np.array_equal(_native.unpack_row(stored, row), _native.unpack_row(dense, row))
        some, of_dense = columns(stored, 2, 5), columns(dense, 2, 5)
        assert some is not None
        assert of_dense is not None
        assert np.array_equal(_native.gemm(x, some), _native.gemm(x, of_dense))

    assert np.array_equal(packing.unpack(stored), packing.unpack(dense))


def test_minus_zero_is_zero() -> None:
    """A mask that was multiplied in leaves -0 where weights were negative: those are dropped as well."""
    w = np.ones((16, 64), np.float32)
    w[:, ::2] = -0.0

    assert sparse.density(packing.pack_dense(w, "bf16")) == 0.5


def hostile(stored: PackedWeight) -> dict[str, PackedWeight]:
    """Broken weights that a file could hold instead of `stored`, by what is wrong with them."""
    assert stored.offsets is not None

    def offsets(change: np.ndarray) -> PackedWeight:
        return replace(stored, offsets=change.astype(np.uint32))

    def values(index: int, value: int) -> PackedWeight:
        changed = stored.values.copy()
        changed[index] = value
        return replace(stored, values=changed)

    falling = stored.offsets[:, ::-1].copy()
    last = stored.offsets.copy()
    last[-1, -1] = 2**32 - 1
    few = int(stored.values[0]).bit_count() < 4
    count = values(0, 255 if few else 0)
    return {
        "offsets that fall": offsets(falling),
        "an offset beyond the end": offsets(last),
        "a count that disagrees": count,
        "every bit set": replace(stored, values=np.full_like(stored.values, 255)),
        "cut short": replace(stored, values=stored.values[:-4]),
        "longer": replace(stored, values=np.concatenate([stored.values, np.zeros(8, np.uint8)])),
        "no tail": replace(stored, values=stored.values[:100]),
    }


@pytest.mark.parametrize("fmt", FORMATS)
def test_hostile_streams_are_refused_and_read_nothing_outside(fmt: str) -> None:
    """Checked they are refused. Unchecked, a kernel stays inside, which test_gemm_paths.py shows."""
    stored = sparse.to_sparse(pruned(fmt, 40, 200, 0.5, np.random.default_rng(2)))
    x = np.ones((1, 200), np.float32)

    for what, weight in hostile(stored).items():
        with pytest.raises(WeightError, match="sparse"):
            sparse.kept(weight)
        with suppress(WeightError):
            assert _native.gemm(x, weight).shape == (1, 40), what


def test_kinds_without_an_exact_zero_are_refused() -> None:
    w = np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)
    for weight in (
        packing.pack_dense(w, "f32"),
        packing.pack_quant(packing.quantise(w, 4, symmetric=True)),
        packing.pack_quant(packing.quantise(w, 8, symmetric=False)),
    ):
        with pytest.raises(WeightError, match="cannot be stored sparse"):
            sparse.to_sparse(weight)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
def test_damaged_streams_read_nothing_outside_under_a_sanitizer(tmp_path: Path) -> None:
    program = tmp_path / "sparse_streams"
    sources = [HERE / "sparse_streams.c", KERNELS / "sparse.c"]
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *COMMON_FLAGS, *flags, "-I", KERNELS, *sources, "-o", program], check=True)

    run = subprocess.run([program], capture_output=True, text=True)

    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr
