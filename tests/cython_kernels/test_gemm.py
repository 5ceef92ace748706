"""Every format on every usable ISA keeps its bound, touches only its share, and is the same however cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels.errors import WeightError
from tests.support.kernels.gemm_reference import FORMATS, expected, make_weight
from tests.support.tiers import examples

EDGES = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 97)
ROWS = (*range(1, 10), 15, 16, 17, 31, 32, 33, 64)

pytestmark = pytest.mark.parametrize("name", isa.usable())
formats = pytest.mark.parametrize("fmt", FORMATS)


def random_x(m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((m, k), dtype=np.float32) * np.exp2(rng.integers(-8, 8, (m, 1))).astype(
        np.float32
    )


def assert_within_bound(x: np.ndarray, w: packing.PackedWeight, got: np.ndarray, k_parts: int = 1) -> None:
    y, bound = expected(x, w, k_parts)

    excess = np.abs(got - y) - bound
    assert (excess <= 0).all(), f"{excess.max()} beyond the bound, {w.kind} n={w.n} k={w.k} m={len(x)}"


@formats
def test_every_edge_of_n_and_k_keeps_the_bound(name: str, fmt: str) -> None:
    rng = np.random.default_rng(1)
    with isa.using(name):
        for n in EDGES:
            for k in EDGES:
                w, x = make_weight(fmt, n, k, rng), random_x(int(rng.choice(ROWS)), k, rng)
                assert_within_bound(x, w, _native.gemm(x, w))


def random_schedule(rng: np.random.Generator) -> dict[str, Any]:
    """Any schedule, sensible or not: out-of-range values are clamped by the kernels."""
    wild = rng.random() < 0.3
    low, high = (-(2**31), 2**31) if wild else (1, 100)
    fields = ("mr", "panels", "block_m", "block_n", "block_k", "prefetch_bytes")
    fields += ("threads_m", "threads_n", "threads_k")
    drawn = {field: int(rng.integers(low, high)) for field in fields}
    return drawn | {
        "block_n": drawn["block_n"] if wild else 16 * drawn["block_n"],
        "loop_order": str(rng.choice(["nm", "mn"])),
    }


def cuts(size: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    points = sorted({0, size, *rng.integers(0, size + 1, 2).tolist()})
    return list(pairwise(points))


@formats
@examples(25)
@given(
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    m=st.integers(1, 40) | st.sampled_from((64, 70)),
    k_parts=st.sampled_from((1, 1, 2, 3, 64)),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_cut_and_no_schedule_changes_a_bit(
    name: str, fmt: str, n: int, k: int, m: int, k_parts: int, seed: int
) -> None:
    """Row by row with the default schedule against any cut into shares, each with its own schedule."""
    rng = np.random.default_rng(seed)
    w, x = make_weight(fmt, n, k, rng), random_x(m, k, rng)
    with isa.using(name):
        one_by_one = np.concatenate([_native.gemm(row[None], w, k_parts=k_parts) for row in x])
        prepared, y = _native.prepare_rows(x, w), np.full((m, n), np.nan, np.float32)
        for rows in cuts(m, rng):
            for panels in cuts(-(-n // 16), rng):
                _native.gemm_share(prepared, w, y, rows, panels, random_schedule(rng), k_parts=k_parts)

        assert np.array_equal(y, one_by_one)


@formats
@pytest.mark.parametrize("k_parts", [1, 2, 3, 7, 64])
def test_part_sums_added_in_order_are_the_product(name: str, fmt: str, k_parts: int) -> None:
    """Each part by its own schedule; most of 64 parts of so short a k are empty, and count as zero."""
    rng = np.random.default_rng(11)
    w, x = make_weight(fmt, 70, 330, rng), random_x(9, 330, rng)
    with isa.using(name):
        prepared, total = _native.prepare_rows(x, w), np.zeros((9, 70), np.float32)
        for part in range(k_parts):
            y = np.full_like(total, np.nan)
            _native.gemm_share(prepared, w, y, schedule=random_schedule(rng), k_parts=k_parts, part=part)
            total += y
        whole = _native.gemm(x, w, k_parts=k_parts)

        assert np.array_equal(total, whole)
        assert_within_bound(x, w, whole, k_parts)


@formats
def test_add_adds_the_finished_sum_once(name: str, fmt: str) -> None:
    rng = np.random.default_rng(3)
    w, x = make_weight(fmt, 40, 160, rng), random_x(7, 160, rng)
    before = rng.standard_normal((7, 40), dtype=np.float32)
    with isa.using(name):
        prepared, y = _native.prepare_rows(x, w), before.copy()
        for block_k, k_parts in itertools.product((32, 1000), (1, 3)):
            y[...] = before
            schedule = random_schedule(rng) | {"block_k": block_k}
            _native.gemm_share(prepared, w, y, schedule=schedule, add=True, k_parts=k_parts)

            assert np.array_equal(y, before + _native.gemm(x, w, k_parts=k_parts))


@formats
def test_a_share_leaves_the_rest_alone(name: str, fmt: str) -> None:
    rng = np.random.default_rng(4)
    w, x = make_weight(fmt, 70, 64, rng), random_x(9, 64, rng)
    with isa.using(name):
        y = np.full((9, 70), np.nan, np.float32)
        _native.gemm_share(_native.prepare_rows(x, w), w, y, (2, 7), (1, 3))

        assert np.isfinite(y[2:7, 16:48]).all()
        assert np.isnan(np.delete(y, np.s_[2:7], 0)).all()
        assert np.isnan(np.delete(y, np.s_[16:48], 1)).all()


@formats
def test_every_thread_has_a_share_of_its_own_by_default(name: str, fmt: str) -> None:
    """Products of few rows and of many; the threads divide columns or rows."""
    w = make_weight(fmt, 150, 33, np.random.default_rng(5))
    with isa.using(name):
        for m, threads in itertools.product((1, 8, 300), (1, 2, 3)):
            schedule = _native.default_schedule(w, m, threads)
            seen = np.zeros((m, 10), int)
            for thread in range(threads):
                (r0, r1), (p0, p1) = _native.share(w, m, thread, schedule)
                assert r0 < r1
                assert p0 < p1
                seen[r0:r1, p0:p1] += 1

            assert (seen == 1).all()


@pytest.mark.parametrize("fmt", ["q8", "q8 group 16", "q8 column", "q4 min"])
def test_groups_without_a_usable_scale(name: str, fmt: str) -> None:
    """Zeros and dust give exact zeros; an infinity or NaN spoils its own row and no other."""
    rng = np.random.default_rng(6)
    w = make_weight(fmt, 20, 64, rng)
    x = np.zeros((5, 64), np.float32)
    x[1] = 1e-42
    x[2, 3], x[3, 40] = np.inf, np.nan
    x[4] = 3e38
    with isa.using(name):
        y = _native.gemm(x, w)

        assert not y[:2].any()
        assert np.isnan(y[2:4]).all()
        with np.errstate(over="ignore"):
            assert_within_bound(x[4:] / 2**100, w, _native.gemm(x[4:] / np.float32(2**100), w))


@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_infinities_and_nans_reach_the_result(name: str, fmt: str) -> None:
    w = make_weight(fmt, 16, 33, np.random.default_rng(7))
    x = np.ones((3, 33), np.float32)
    x[1, 32], x[2, 0] = np.nan, np.inf
    with isa.using(name):
        y = _native.gemm(x, w)

        assert np.isfinite(y[0]).all()
        assert np.isnan(y[1]).all()
        assert np.isinf(y[2]).all()


@formats
def test_extreme_integers_are_exact(name: str, fmt: str) -> None:
    """All weights at an end of their range, all activations at theirs: nothing saturates on the way."""
    rng = np.random.default_rng(8)
    for end in (0, 255):
        w = make_weight(fmt, 16, 64, rng)
        if w.kind in ("q8", "q4"):
            w = replace(w, values=np.full_like(w.values, end))
        for sign in (1, -1):
            x = np.full((5, 64), sign, np.float32)
            with isa.using(name):
                assert_within_bound(x, w, _native.gemm(x, w))


@formats
def test_unpack_row_is_the_reference_row(name: str, fmt: str) -> None:
    w = make_weight(fmt, 37, 97, np.random.default_rng(9))
    matrix = packing.unpack(w)
    with isa.using(name):
        for row in range(37):
            assert np.array_equal(_native.unpack_row(w, row), matrix[row])


def test_bad_operands_are_refused(name: str) -> None:
    rng = np.random.default_rng(10)
    w, x = make_weight("q4 min", 32, 64, rng), random_x(2, 64, rng)
    bad: list[Any] = [
        replace(w, values=w.values[:, :-1]),
        replace(w, values=w.values.astype(np.int8)),
        replace(w, scales=w.scales[..., ::-1] if w.scales is not None else None),
        replace(w, scales=None),
        replace(w, mins=w.scales.astype(np.float32) if w.scales is not None else None),
        replace(w, zero_point=8),
        replace(w, group=16),
        replace(w, kind="q9"),
        replace(w, n=0),
        replace(make_weight("q8", 16, 32, rng), zero_point=256),
    ]
    with isa.using(name):
        for broken in bad:
            with pytest.raises(WeightError):
                _native.gemm(x, broken)
        with pytest.raises(ValueError, match="columns"):
            _native.gemm(x[:, :-1], w)
        with pytest.raises(ValueError, match="lie outside"):
            _native.gemm_share(_native.prepare_rows(x, w), w, np.zeros((2, 32), np.float32), (0, 3))
        with pytest.raises(ValueError, match="fit"):
            _native.gemm_share(np.zeros((2, 9), np.uint8), w, np.zeros((2, 32), np.float32))
        with pytest.raises(ValueError, match="part 2 of 2"):
            _native.gemm_share(
                _native.prepare_rows(x, w), w, np.zeros((2, 32), np.float32), k_parts=2, part=2
            )
        with pytest.raises(ValueError, match="row 32"):
            _native.unpack_row(w, 32)
        assert _native.gemm(x[:0], w).shape == (0, 32)
