"""Attention over one KV head: within its bound of float64, and bit for bit the same however rows meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa

DIMS = (2, 8, 16, 40, 64, 80, 96, 128, 256)
LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 300)


@pytest.fixture(params=isa.usable(), autouse=True)
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with isa.using(request.param):
        yield request.param


@dataclass(frozen=True)
class Problem:
    """Rows of queries over one head's keys and values; row r sees positions first[r]..last[r]."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def rows(self, chosen: slice) -> Problem:
        return Problem(self.q[chosen], self.keys, self.values, self.first[chosen], self.last[chosen])

    def run(self, slot_base: int = 0, half: bool = False) -> np.ndarray:
        out: np.ndarray = _native.attend_one_head(
            self.q, self.keys, self.values, self.first, self.last, slot_base, half
        )
        return out


def problem(rows: int, dim: int, positions: int, window: int | None = None, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    q, keys, values = (rng.standard_normal((n, dim), dtype=np.float32) for n in (rows, positions, positions))
    last = np.sort(rng.integers(0, positions, rows))
    last[-1] = positions - 1
    first = np.zeros(rows, np.int64) if window is None else np.maximum(last - window + 1, 0)
    return Problem(q / np.float32(np.sqrt(dim)), keys, values, first, last)


def expected(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and the bound of families/attention.c."""
    q, keys, values = (array.astype(np.float64) for array in (p.q, p.keys, p.values))
    dim, positions = q.shape[1], np.arange(len(keys))
    scores = q @ keys.T
    seen = (positions >= p.first[:, None]) & (positions <= p.last[:, None])
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    out = weights / weights.sum(axis=1, keepdims=True) @ values
    largest = np.linalg.norm(q, axis=1, keepdims=True) * np.linalg.norm(keys, axis=1).max()
    weight_error = ((dim + 4) * largest + 4) * 2.0**-23
    n = len(keys)
    return out, (2 * weight_error + (n + 2 * n / 128 + 4) * 2.0**-23) * np.abs(values).max()


@pytest.mark.parametrize("dim", DIMS)
def test_every_edge_keeps_the_bound(dim: int) -> None:
    for positions in LENGTHS:
        for rows in (1, 2, 3, 5, 6, 7, 11, 12, 13, 25):
            p = problem(rows, dim, positions, seed=positions + rows)
            want, bound = expected(p)

            assert (np.abs(p.run() - want) <= bound).all()


@pytest.mark.parametrize("window", [1, 5, 128, 200])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    p = problem(20, 64, 290, window)
    want, bound = expected(p)

    assert (np.abs(p.run() - want) <= bound).all()


def test_float16_storage_is_the_only_loss() -> None:
    """Against the rounded keys and values the bound is that of float32."""
    for rows in (1, 3, 30):
        p = problem(rows, 64, 260)
        stored = Problem(
            p.q,
            p.keys.astype(np.float16).astype(np.float32),
            p.values.astype(np.float16).astype(np.float32),
            p.first,
            p.last,
        )
        want, bound = expected(stored)

        assert (np.abs(p.run(half=True) - want) <= bound).all()
        assert (p.run(half=True) == stored.run()).all()


def test_float16_saturates_instead_of_overflowing() -> None:
    keys, values = np.full((3, 8), 1e9, np.float32), np.full((3, 8), -1e9, np.float32)
    nothing, last = np.zeros(1, np.int64), np.full(1, 2)

    out = Problem(np.full((1, 8), 1e-6, np.float32), keys, values, nothing, last).run(half=True)

    assert np.allclose(out, -65504.0)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    positions=st.integers(1, 300),
    base=st.integers(0, 70),
    dim=st.sampled_from((16, 40, 64)),
    window=st.sampled_from((None, 3, 100)),
    half=st.booleans(),
    data=st.data(),
)
def test_a_row_alone_equals_the_row_in_company(
    rows: int, positions: int, base: int, dim: int, window: int | None, half: bool, data: st.DataObject
) -> None:
    """Bit for bit, wherever the slots begin; every slot that holds nothing is NaN and must not matter."""
    p = problem(rows, dim, positions, window, seed=rows)
    together = p.run(half=half)
    cut = data.draw(st.integers(0, rows))

    pieces = [p.rows(piece).run(base, half) for piece in (slice(0, cut), slice(cut, rows)) if len(p.q[piece])]
    alone = [p.rows(slice(r, r + 1)).run(half=half) for r in range(0, rows, 7)]

    assert (np.concatenate(pieces) == together).all()
    assert (np.concatenate(alone) == together[::7]).all()


def test_later_positions_do_not_matter() -> None:
    """A row's result is the same before and after others are appended: what makes decoding equal prefill."""
    p = problem(1, 64, 150)
    longer = problem(1, 64, 300, seed=9)
    keys, values = np.concatenate([p.keys, longer.keys]), np.concatenate([p.values, longer.values])
    both = Problem(np.concatenate([p.q, longer.q]), keys, values, np.zeros(2, np.int64), np.array([149, 449]))

    assert (p.run() == both.run()[:1]).all()
