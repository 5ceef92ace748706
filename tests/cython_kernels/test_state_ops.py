"""Convolutions, recurrences and adapters' products beside float64; their bits for any cut, team and ISA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels.packing import from_bf16, pack_thin, thin_shape, to_bf16, unpack
from phasewise.serving.batch import SequenceSlice
from tests.support.tiers import isas

native = pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")

VOCAB, ROWS, PLACES = 64, 48, 6
U = 2.0**-24


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    groups: int = 3
    key_dim: int = 13
    value_dim: int = 21
    erases: bool = True
    by_key: bool = False

    @property
    def decays(self) -> int:
        return self.heads * (self.key_dim if self.by_key else 1)

    @property
    def n_gates(self) -> int:
        return 2 * self.heads + (self.decays if self.by_key else 0)

    @property
    def widths(self) -> tuple[int, int]:
        return self.groups * self.key_dim, self.heads * self.value_dim


def _program(width: int, outputs: int, team: int = 1) -> native.Program:
    shape = {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16, "hidden": width, "ffn": 16}
    shape |= {"vocab": VOCAB, "norm_eps": 1e-6, "outputs": outputs}
    room = {"kv_slots": 256, "max_tokens": ROWS, "max_slices": 4, "max_logit_rows": ROWS, "max_threads": team}
    return native.Program(shape, {**room, "kv_format": "f32", "state_places": PLACES}, np.empty(0))


def _table(width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((VOCAB, width)).astype(np.float32)


def _convolution(table: np.ndarray, taps: np.ndarray, *, gates_rows: bool, silu: bool) -> native.Program:
    width, channels = table.shape[1], len(taps)
    program = _program(width, channels)
    program.embed(packing.pack_dense(table, "f32"), 0, width)
    out = ROWS * width
    program.convolve(taps, 0, width, out, channels, gates_rows=gates_rows, silu=silu)
    program.seal(out)
    return program


RATES = np.linspace(-2.0, -0.05, 6).astype(np.float32)


def _offsets(shape: Shape) -> np.ndarray:
    return np.linspace(-3.0, 2.0, shape.decays).astype(np.float32)


def _recurrence(table: np.ndarray, shape: Shape, team: int = 1) -> native.Program:
    """Rows of the table: queries, keys, values, what factors and time steps are of."""
    width, (keys, values) = table.shape[1], shape.widths
    program = _program(width, values, team)
    program.embed(packing.pack_dense(table, "f32"), 0, width)
    gates, out = ROWS * width, ROWS * (width + shape.n_gates)
    offset = 2 * keys + values
    normalised = (0, width, 0, keys) if shape.erases else None
    program.state_gates(
        shape,
        offset,
        width,
        gates,
        shape.n_gates,
        RATES,
        _offsets(shape),
        (0.001, 5.0),
        normalised=normalised,
        factor_at=shape.decays if shape.by_key else None,
    )
    program.recur(shape, 0, width, out, values, (gates, shape.n_gates), (0, keys, 2 * keys))
    program.seal(out)
    return program


def _run(
    program: native.Program, tokens: list[int], cuts: list[int], team: native.Team, **keep: int
) -> np.ndarray:
    """Rows of every token, the sequence being cut into steps."""
    rows, start = [], 0
    for end in [*cuts, len(tokens)]:
        piece = SequenceSlice(tokens[start:end], start, 0, True, state=2, **keep)
        n = program.run(team, [piece], every_row=True)
        rows.append(np.asarray(program)[:n].copy())
        start = end
    return np.concatenate(rows)


@pytest.mark.parametrize("gates_rows", [False, True])
def test_a_convolution_is_that_of_float64(gates_rows: bool) -> None:
    channels, n_taps, tokens = 37, 4, list(range(20))
    table, taps = _table(3 * channels if gates_rows else channels, 1), _table(channels, 2)[:n_taps].T.copy()
    x = table[tokens].astype(np.float64)
    gate, x = (
        (x[:, channels : 2 * channels], x[:, :channels] * x[:, 2 * channels :]) if gates_rows else (1.0, x)
    )
    padded = np.concatenate([np.zeros((n_taps - 1, channels)), x])
    windows = np.stack([padded[i : i + len(tokens)] for i in range(n_taps)])
    expected = (windows * taps.T[:, None]).sum(0) * gate
    bound = (n_taps + 3) * U * (np.abs(windows * taps.T[:, None]).sum(0) * np.abs(gate))
    for name in isas():
        with isa.using(name):
            computed = _run(
                _convolution(table, taps, gates_rows=gates_rows, silu=False),
                tokens,
                [3, 4],
                native.Team(None, 1),
            )
        assert (np.abs(computed - expected) <= bound).all(), name


def _reference(table: np.ndarray, tokens: list[int], shape: Shape) -> np.ndarray:
    keys, values = shape.widths
    rows, state = [], np.zeros((shape.heads, shape.key_dim, shape.value_dim))
    for row in table[tokens].astype(np.float64):
        q, k = (row[start : start + keys].reshape(shape.groups, -1) for start in (0, keys))
        v, rest = row[2 * keys : 2 * keys + values].reshape(shape.heads, -1), row[2 * keys + values :]
        if shape.erases:
            q, k = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (q, k))
            q = q / np.sqrt(shape.key_dim)
        q, k = (np.repeat(x, shape.heads // shape.groups, axis=0) for x in (q, k))
        factors, times = rest[: shape.heads], rest[-shape.heads :]
        if shape.by_key:
            times, factors = rest[: shape.decays], rest[shape.decays :]
        step = np.clip(np.logaddexp(0, times + _offsets(shape)), 0.001, 5.0).reshape(shape.heads, -1)
        factor = 1 / (1 + np.exp(-factors)) if shape.erases else step[:, 0]
        state = state * np.exp(RATES[:, None] * step)[:, :, None]
        kept = np.einsum("hkv,hk->hv", state, k) if shape.erases else 0
        state = state + k[:, :, None] * ((v - kept) * factor[:, None])[:, None]
        rows.append(np.einsum("hkv,hk->hv", state, q).reshape(-1))
    return np.stack(rows)


@pytest.mark.parametrize("shape", [Shape(), Shape(erases=False), Shape(by_key=True)])
def test_a_recurrence_is_that_of_float64_and_has_the_same_bits_however_it_is_cut(shape: Shape) -> None:
    """Rows one by one, and as many as pass a state together, and one more."""
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, VOCAB, 40)]
    keys, values = shape.widths
    table = _table(2 * keys + values + shape.decays + (shape.heads if shape.erases else 0), 4)
    expected, bits = _reference(table, tokens, shape), set()
    # Every step adds (key_dim / 4 + 6) u of the largest state, and so does what is read of it.
    bound = len(tokens) * (shape.key_dim / 4 + 12) * U * np.abs(expected).max() * shape.key_dim
    for name in isas():
        with isa.using(name):
            for size, cuts in ((1, []), (1, list(range(1, 40))), (3, [7, 8, 30])):
                computed = _run(_recurrence(table, shape, size), tokens, cuts, native.Team(None, size))
                assert np.abs(computed - expected).max() <= bound, name
                bits.add(computed.tobytes())

    assert len(bits) == 1


@pytest.mark.parametrize(
    ("places", "keeps", "what"),
    [
        ((0, 0), (), "share a place"),
        ((0, PLACES), (), "no place"),
        ((0, 1), ((1, 1),), "share a place"),
        ((0, 1), ((3, 2),), "not there"),
        ((0, 1), ((2, 2), (1, 3)), "not there"),
    ],
)
def test_a_step_with_places_that_cannot_be_is_refused(
    places: tuple[int, int], keeps: tuple[tuple[int, int], ...], what: str
) -> None:
    program = _convolution(_table(20, 6), _table(20, 7)[:3].T.copy(), gates_rows=False, silu=True)
    slices = [
        SequenceSlice([1, 2], 0, 0, True, state=places[0], keeps=keeps),
        SequenceSlice([3], 0, 64, True, state=places[1]),
    ]

    with pytest.raises(ValueError, match=what):
        program.run(native.Team(None, 1), slices, every_row=True)


SHAPES = [(1, 1), (15, 2), (16, 3), (17, 16), (48, 8), (67, 33)]


def _drawn(n: int, rank: int, kind: str, m: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n * 1000 + rank)
    w = rng.standard_normal((n, rank), dtype=np.float32)
    w = from_bf16(to_bf16(w)) if kind == "bf16" else w
    return w, rng.standard_normal((m, rank), dtype=np.float32), rng.standard_normal((9, n), dtype=np.float32)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("n", "rank"), SHAPES)
def test_packing_loses_nothing(n: int, rank: int, kind: str) -> None:
    """Unpacked numbers are those that were packed, in no more room than pairs need."""
    w, _, _ = _drawn(n, rank, kind)
    packed = pack_thin(w, kind)  # type: ignore[arg-type]

    assert packed.values.shape == thin_shape(packed.kind, n, rank)
    assert (unpack(packed) == w).all()


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("n", "rank"), SHAPES)
def test_sums_keep_their_bound_and_are_the_same_everywhere(n: int, rank: int, kind: str) -> None:
    """gamma_rank of the sum, one rounding of the addition; equal bits on every ISA, alone or in company."""
    w, x, before = _drawn(n, rank, kind)
    packed, rows = pack_thin(w, kind), [5, 0, 3, 8, 1, 2, 7]  # type: ignore[arg-type]
    delta = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T
    exact = before.astype(np.float64)
    exact[rows] += delta
    bound = np.zeros_like(exact)
    bound[rows] = rank * U / (1 - rank * U) * size + U * (np.abs(exact[rows]) + size)
    bits = []
    for name in isas():
        with isa.using(name):
            y = before.copy()
            _native.add_low_rank(x, packed, y, rows)
            alone = before.copy()
            for i, row in enumerate(rows):
                for panel in range(packed.panels):
                    _native.add_low_rank(x[i : i + 1], packed, alone, [row], (panel, panel + 1))

        assert (np.abs(y - exact) <= bound).all()
        assert y.tobytes() == alone.tobytes()
        bits.append(y.tobytes())
    assert len(set(bits)) == 1


def test_what_does_not_fit_is_refused() -> None:
    """Rows and panels that lie outside, and weights of another kind, never reach a kernel."""
    w, x, y = _drawn(17, 4, "f32")
    packed = pack_thin(w, "f32")
    for rows, panels in (([9] * 7, None), ([-1] * 7, None), ([0] * 7, (0, 3))):
        with pytest.raises(ValueError, match="outside"):
            _native.add_low_rank(x, packed, y.copy(), rows, panels)
    with pytest.raises(ValueError, match="fit"):
        _native.add_low_rank(x[:, :3].copy(), packed, y.copy(), [0] * 7)
