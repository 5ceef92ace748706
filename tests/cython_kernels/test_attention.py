"""Attention over one KV head: within its bound of float64, and bit for bit the same however rows meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from tests.support.tiers import examples

CHUNK = 128
DIMS = (2, 8, 16, 40, 64, 80, 96, 128, 256)
SCALED = ("int8", "int16")
"""Formats with a scale for each key and each value."""
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

    def run(
        self, slot_base: int = 0, kv_format: str = "f32", table: Sequence[int] | None = None
    ) -> np.ndarray:
        """One run of slots from `slot_base` on, or those of a table."""
        if table is None:
            table = range(slot_base, slot_base + len(self.keys), CHUNK)
        out: np.ndarray = _native.attend_one_head(
            self.q, self.keys, self.values, self.first, self.last, table, kv_format
        )
        return out

    def as_stored(self, kv_format: str) -> Problem:
        """With the keys and values that a cache of this format holds."""
        key_most = min(np.floor(np.float32(65536) / np.sqrt(np.float32(self.q.shape[1]))), 32767)
        keys, values = stored(self.keys, kv_format, key_most), stored(self.values, kv_format, 8191)
        return replace(self, keys=keys, values=values)


def stored(rows: np.ndarray, kv_format: str, int16_most: float) -> np.ndarray:
    """float64: exactly what the bits stand for."""
    if kv_format == "f16":
        return rows.astype(np.float16).astype(np.float64)
    if kv_format == "bf16":
        return packing.from_bf16(packing.to_bf16(rows)).astype(np.float64)
    if kv_format in SCALED:
        codes, scales = quantised(rows, 127 if kv_format == "int8" else int16_most)
        return codes * scales.astype(np.float64)
    if kv_format == "int4":
        codes, scales, least = quantised_groups(rows)
        return (codes * scales + least).reshape(rows.shape).astype(np.float64)
    return rows.astype(np.float64)


def quantised(rows: np.ndarray, most: float = 127) -> tuple[np.ndarray, np.ndarray]:
    """Codes up to `most`, and for every row its scale: the float32 steps of families/quantise.c."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    codes = np.rint(rows * (np.float32(most) / largest))
    return codes, largest / np.float32(most)


def quantised_groups(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes up to 15, and the scale and minimum of each: the float32 steps of families/attention.c."""
    parts: list[list[np.ndarray]] = [[], [], []]
    for start in range(0, rows.shape[1], 32):
        group = rows[:, start : start + 32]
        least = rounded_to_bf16(group.min(axis=1, keepdims=True), downwards=True)
        spread = group.max(axis=1, keepdims=True) - least
        scale = rounded_to_bf16(spread / np.float32(15), downwards=False) * (spread >= 2.0**-100)
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.rint((group - least) * (np.float32(1) / scale))
        codes = np.where(scale > 0, np.minimum(codes, 15), 0)
        for into, array in zip(parts, (codes, scale, least), strict=True):
            into.append(np.broadcast_to(array, group.shape).astype(np.float32))
    codes, scales, least = (np.concatenate(arrays, axis=1) for arrays in parts)
    return codes, scales, least


def rounded_to_bf16(x: np.ndarray, *, downwards: bool) -> np.ndarray:
    """The nearest bfloat16 that is not above (or not below) x."""
    bits = x.astype(np.float32).view(np.uint32)
    away = bits + np.where((bits >> 31 == 1) == downwards, np.uint32(0xFFFF), np.uint32(0))
    return (away & np.uint32(0xFFFF0000)).view(np.float32)


def problem(rows: int, dim: int, positions: int, window: int | None = None, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    q, keys, values = (rng.standard_normal((n, dim), dtype=np.float32) for n in (rows, positions, positions))
    last = np.sort(rng.integers(0, positions, rows))
    last[-1] = positions - 1
    first = np.zeros(rows, np.int64) if window is None else np.maximum(last - window + 1, 0)
    return Problem(q / np.float32(np.sqrt(dim)), keys, values, first, last)


def expected(p: Problem, extra_roundings: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and the bound of families/attention.c; int8 rounds a score and a weight once more."""
    q, keys, values = (array.astype(np.float64) for array in (p.q, p.keys, p.values))
    dim, positions = q.shape[1] + extra_roundings, np.arange(len(keys))
    scores = q @ keys.T
    seen = (positions >= p.first[:, None]) & (positions <= p.last[:, None])
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    out = weights / weights.sum(axis=1, keepdims=True) @ values
    largest = np.linalg.norm(q, axis=1, keepdims=True) * np.linalg.norm(keys, axis=1).max()
    weight_error = ((dim + 4) * largest + 4) * 2.0**-23
    n = len(keys) + extra_roundings
    return out, (2 * weight_error + (n + 2 * n / 128 + 4) * 2.0**-23) * np.abs(values).max()


def pair_error(p: Problem) -> np.ndarray:
    """Error that products of pairs of int16 add to the bound (families/attention/pairs.c)."""
    q, keys = p.q.astype(np.float64), np.abs(p.keys.astype(np.float64)).sum(axis=1).max()
    of_scores = 0.501 * np.linalg.norm(q, axis=1, keepdims=True) * keys / 32704
    return (np.exp(2 * of_scores) - 1 + 0.501 * CHUNK / 32767) * np.abs(p.values).max()


def expected_of_scaled(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """As `expected`, of int8 and int16: by products of pairs."""
    want, bound = expected(p, extra_roundings=6)
    return want, bound + pair_error(p)


@pytest.mark.many
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


@pytest.mark.many
@pytest.mark.parametrize("kv_format", ["f16", "bf16", "int8", "int4", "int16"])
@pytest.mark.parametrize("dim", [2, 40, 64, 80, 128, 256])
def test_storage_is_the_only_loss(dim: int, kv_format: str) -> None:
    """Against the rounded keys and values the bound is that of float32, or of int8 and int16."""
    for rows in (1, 3, 13, 30):
        p = problem(rows, dim, 260, seed=rows)
        rounded = p.as_stored(kv_format)
        want, bound = expected_of_scaled(rounded) if kv_format in SCALED else expected(rounded)

        assert (np.abs(p.run(kv_format=kv_format) - want) <= bound).all()
        if kv_format not in SCALED:
            assert (p.run(kv_format=kv_format) == replace_f32(rounded).run()).all()


def replace_f32(p: Problem) -> Problem:
    return replace(p, keys=p.keys.astype(np.float32), values=p.values.astype(np.float32))


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("positions", [1, 16, 129, 300])
@pytest.mark.parametrize(("kv_format", "key_most", "value_most"), [("int8", 127, 127), ("int16", 8192, 8191)])
def test_scaled_formats_keep_the_bound_of_their_scales(
    kv_format: str, key_most: int, value_most: int, positions: int, window: int | None
) -> None:
    """Against keys and values before they were rounded, of very different sizes."""
    p = problem(14, 64, positions, window, seed=positions)
    sizes = np.float32(2.0) ** np.random.default_rng(3).integers(-20, 3, (positions, 1))
    p = replace(p, keys=p.keys / 8, values=p.values * sizes.astype(np.float32))
    want, bound = expected(p)
    _, bound = expected_of_scaled(p.as_stored(kv_format))
    key_scales, value_scales = quantised(p.keys, key_most)[1].max(), quantised(p.values, value_most)[1].max()
    score_error = 0.5001 * key_scales * np.abs(p.q).sum(axis=1, keepdims=True)
    rounding = (np.exp(2 * score_error) - 1) * np.abs(p.values).max() + 0.5001 * value_scales

    assert (np.abs(p.run(kv_format=kv_format) - want) <= bound + rounding).all()


@pytest.mark.parametrize("kv_format", SCALED)
def test_a_row_of_nothing_is_nothing(kv_format: str) -> None:
    p = problem(3, 16, 20)

    out = replace(p, keys=p.keys * 0, values=p.values * np.float32(1e-40)).run(kv_format=kv_format)

    assert (out == 0).all()


@pytest.mark.parametrize("kv_format", SCALED)
def test_queries_of_any_size_count(kv_format: str) -> None:
    """Of nothing every position weighs the same; where one key is far ahead its value is the result."""
    p = problem(3, 16, 20)
    sizes = np.array([[0], [1e-38], [1e30]], np.float32)

    out = replace(p, q=np.ones_like(p.q) * sizes, last=np.full(3, 19)).run(kv_format=kv_format)

    assert np.allclose(out[:2], p.values.mean(axis=0), atol=0.03)
    assert np.allclose(out[2], p.values[p.keys.sum(axis=1).argmax()], atol=0.03)


def test_weights_are_exponentials_down_to_nothing() -> None:
    """Of two values 0 and 1, the second with a score that is lower by x: w / (1 + w), w = exp(-x)."""
    x = np.concatenate([np.linspace(0, 86.5, 20_000), [88, 200, 1e30]]).astype(np.float32)
    keys, values = np.array([[0, 0], [-1, 0]], np.float32), np.array([[0, 0], [1, 1]], np.float32)
    q = np.stack([x, np.zeros_like(x)], axis=1)
    nothing, last = np.zeros(len(x), np.int64), np.ones(len(x), np.int64)
    weights = np.exp(-x.astype(np.float64))

    out = Problem(q, keys, values, nothing, last).run()[:, 0]

    bound = (5 + 2 * np.minimum(x, 88)) * 2.0**-24 * weights + 1e-38
    assert (np.abs(out - weights / (1 + weights)) <= bound).all()


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("positions", [1, 16, 129, 300])
@pytest.mark.parametrize("dim", [8, 40, 64])
def test_int4_keeps_the_bound_of_its_scales(positions: int, window: int | None, dim: int) -> None:
    """Against keys and values before they were rounded, of very different sizes and offsets."""
    p = problem(14, dim, positions, window, seed=positions)
    rng = np.random.default_rng(3)
    sizes = np.float32(2.0) ** rng.integers(-20, 3, (positions, 1)).astype(np.float32)
    offsets = rng.integers(-3, 4, (positions, 1)).astype(np.float32)
    p = replace(p, keys=p.keys / 8 + offsets / 8, values=(p.values + offsets) * sizes)
    want, _ = expected(p)
    _, bound = expected(p.as_stored("int4"))
    errors = []
    for rows in (p.keys, p.values):
        scale, spread = quantised_groups(rows)[1].max(), np.ptp(rows, axis=1).max()
        assert scale <= (spread + 2.0**-7 * np.abs(rows).max()) / 15 * (1 + 2.0**-7)
        errors.append(0.5001 * scale + 2.0**-23 * np.abs(rows).max())
    score_error = errors[0] * np.abs(p.q).sum(axis=1, keepdims=True)
    rounding = (np.exp(2 * score_error) - 1) * np.abs(p.values).max() + errors[1]

    assert (np.abs(p.run(kv_format="int4") - want) <= bound + rounding).all()


@pytest.mark.parametrize("dim", [2, 40, 64])
def test_an_int4_row_that_is_constant_is_itself(dim: int) -> None:
    """Zero, a bfloat16, and what is too small for a scale."""
    p = problem(3, dim, 20)
    for value in (0.0, -1.5, 1e-40):
        out = replace(p, values=np.full_like(p.values, value)).run(kv_format="int4")

        assert np.allclose(out, value, rtol=1e-5, atol=2.0**-100)


@pytest.mark.parametrize("kv_format", ["int8", "int4", "int16"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_quantised_rows_hide_no_infinity(bad: float, kv_format: str) -> None:
    """Rows that see it get NaN; rows that do not get what there was without it."""
    p = problem(2, 16, 20)
    values = p.values.copy()
    values[-1, 3] = bad
    alone, spoilt = p.rows(slice(0, 1)), replace(p, values=values)
    assert alone.last[0] < 19

    assert (spoilt.rows(slice(0, 1)).run(kv_format=kv_format) == alone.run(kv_format=kv_format)).all()
    assert np.isnan(spoilt.rows(slice(1, 2)).run(kv_format=kv_format)).all()


def test_float16_saturates_instead_of_overflowing() -> None:
    keys, values = np.full((3, 8), 1e9, np.float32), np.full((3, 8), -1e9, np.float32)
    nothing, last = np.zeros(1, np.int64), np.full(1, 2)

    out = Problem(np.full((1, 8), 1e-6, np.float32), keys, values, nothing, last).run(kv_format="f16")

    assert np.allclose(out, -65504.0)


@examples(40)
@given(
    rows=st.integers(1, 40),
    positions=st.integers(1, 300),
    base=st.integers(0, 70),
    dim=st.sampled_from((16, 40, 64)),
    window=st.sampled_from((None, 3, 100)),
    kv_format=st.sampled_from(KV_FORMATS),
    data=st.data(),
)
def test_a_row_alone_equals_the_row_in_company(
    rows: int, positions: int, base: int, dim: int, window: int | None, kv_format: str, data: st.DataObject
) -> None:
    """Bit for bit, wherever the slots begin; every slot that holds nothing is NaN and must not matter."""
    p = problem(rows, dim, positions, window, seed=rows)
    together = p.run(kv_format=kv_format)
    cut = data.draw(st.integers(0, rows))
    table = np.array(data.draw(st.permutations(range(3)))) * (CHUNK + 16) + 16

    halves = [p.rows(half) for half in (slice(0, cut), slice(cut, rows)) if len(p.q[half])]
    pieces = [half.run(base, kv_format) for half in halves]
    in_runs = [half.run(kv_format=kv_format, table=table) for half in halves]
    alone = [p.rows(slice(r, r + 1)).run(kv_format=kv_format) for r in range(0, rows, 7)]

    assert (np.concatenate(pieces) == together).all()
    assert (np.concatenate(in_runs) == together).all()
    assert (np.concatenate(alone) == together[::7]).all()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("positions", [1, 16, 129, 300])
def test_scores_fall_with_the_distance(kv_format: str, positions: int) -> None:
    """As a key that grows longer by one number, whose query is the slope, would have it."""
    rows, dim = 7, 64
    p = problem(rows, dim, positions, seed=positions)
    slopes = 2.0 ** -np.arange(1, rows + 1, dtype=np.float32)
    places = np.linspace(0, positions - 1, rows).astype(np.int64)
    last = np.full(rows, positions - 1)
    table = [0, CHUNK, 2 * CHUNK][: -(-positions // CHUNK)]

    def run(chosen: slice) -> np.ndarray:
        out: np.ndarray = _native.attend_one_head(
            p.q[chosen],
            p.keys,
            p.values,
            p.first[chosen],
            last[chosen],
            table,
            kv_format,
            slopes=slopes[chosen],
            positions=places[chosen],
        )
        return out

    got = run(slice(None))

    held = p.as_stored(kv_format)
    scores = p.q.astype(np.float64) @ held.keys.T
    scores -= slopes[:, None] * np.abs(places[:, None] - np.arange(positions))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    want = weights / weights.sum(axis=1, keepdims=True) @ held.values
    assert np.abs(got - want).max() <= (2e-3 if kv_format in SCALED else 3e-5) * np.abs(p.values).max()
    assert np.concatenate([run(slice(row, row + 1)) for row in range(rows)]).tobytes() == got.tobytes()
