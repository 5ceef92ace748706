"""Latent attention and products by head as ops of a program, beside float64, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from phasewise.cython_kernels import isa, packing
from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.errors import ProgramError
from phasewise.serving.batch import SequenceSlice
from tests.support.tiers import isas

Array = np.ndarray
EPS = 1e-6
SLOTS = 512
STORED = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Largest rounding of a stored number, as a share of it."""


def drawn(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def opened(rows: Array, kv_format: str = "f32", **shape: int) -> Program:
    """Token i embeds as row i, at the arena's start; logits are as wide as a row."""
    n, width = rows.shape
    sizes = {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16, "ffn": 1, **shape}
    room = {"kv_slots": SLOTS, "max_tokens": n, "max_slices": 4, "max_logit_rows": n, "max_threads": 2}
    turned = sizes["head_dim"] - sizes.get("latent", 0) - sizes.get("index", 0)
    angles = np.linspace(1.0, 0.01, turned // 2)
    sizes |= {
        "hidden": width,
        "vocab": max(n, width),
        "norm_eps": EPS,
        "outputs": shape.get("outputs", width),
    }
    program = Program(sizes, {**room, "kv_format": kv_format}, angles)
    table = np.zeros((max(n, width), width), np.float32)
    table[:n] = rows
    program.embed(packing.pack_dense(table, "f32"), 0, width)
    return program


def piece(tokens: range, start: int = 0, base: int = 0) -> SequenceSlice:
    return SequenceSlice(list(tokens), start, base, wants_logits=True)


def run(program: Program, pieces: list[Any]) -> Array:
    n_rows = program.run(Team(None, members=2), pieces, every_row=True)
    return np.asarray(program)[:n_rows].copy()


@pytest.mark.parametrize(
    ("count", "k", "n", "step"),
    [(1, 1, 16, 1), (3, 5, 16, 9), (4, 16, 48, 16), (5, 24, 32, 32), (2, 128, 512, 192)],
)
@pytest.mark.parametrize("n_rows", [1, 7])
def test_products_by_head_equal_float64(count: int, k: int, n: int, step: int, n_rows: int) -> None:
    rows, weights = drawn(1, n_rows, count * step), drawn(2, count, n, k)
    parts = rows.reshape(n_rows, count, step)[:, :, :k]
    want = np.einsum("rhk,hnk->rhn", parts.astype(np.float64), weights.astype(np.float64))
    bound = (k + 2) * 2.0**-24 * np.einsum("rhk,hnk->rhn", np.abs(parts), np.abs(weights))
    for isa_name in isas():
        with isa.using(isa_name):
            program = opened(rows, outputs=count * n)
            out = n_rows * count * step
            program.heads(
                packing.pack_dense(weights.reshape(-1, k), "f32"),
                count,
                0,
                count * step,
                out,
                count * n,
                step,
            )
            program.seal(out)
            got = run(program, [piece(range(n_rows))]).reshape(n_rows, count, n)

            assert (np.abs(got - want) <= bound).all(), isa_name


@dataclass(frozen=True)
class Index:
    """An indexer of `heads` queries of `dim` numbers, which leaves `chosen` positions."""

    heads: int
    dim: int
    chosen: int

    @property
    def width(self) -> int:
        """Numbers of a row: queries, a key, and weights."""
        return self.heads * self.dim + self.dim + self.heads


class Latent:
    """Rows of a stream that hold all that attention over latent vectors reads, and an indexer."""

    def __init__(
        self, heads: int, latent: int, turned: int, keys: int, n: int, index: Index | None = None
    ) -> None:
        self.heads, self.latent, self.turned, self.step, self.turned_from = (
            heads,
            latent,
            turned,
            keys + turned,
            keys,
        )
        self.queries = heads * latent
        self.vectors = self.queries + heads * self.step
        self.indexed = self.vectors + latent + turned
        self.index, self.width = index, self.indexed + (index.width if index else 0)
        self.rows, self.norm = drawn(3, n, self.width), 1 + 0.1 * drawn(4, latent)
        self.index_norm = (1 + 0.1 * drawn(5, index.dim), 0.1 * drawn(6, index.dim)) if index else None
        self.scale = (keys + turned) ** -0.5

    def program(self, kv_format: str, cap: float = 0.0) -> Program:
        """A program whose outputs are what is read of the vectors."""
        out, index = self.heads * self.latent, self.index
        shape = {"latent": self.latent, "head_dim": self.latent + self.turned, "outputs": out}
        if index is not None:
            shape |= {"head_dim": shape["head_dim"] + index.dim, "index": index.dim, "chosen": index.chosen}
        program = opened(self.rows, kv_format, n_heads=self.heads, **shape)
        out_start = len(self.rows) * self.width
        if index is not None and self.index_norm is not None:
            keys = self.indexed + index.heads * index.dim
            places = [(column, self.width) for column in (self.indexed, keys, keys + index.dim)]
            program.choose(0, *places, index.heads, *self.index_norm, EPS)
        queries = (self.queries, self.width, self.step, self.turned_from)
        program.attend_latent(
            0,
            0,
            self.width,
            out_start,
            out,
            queries,
            (self.vectors, self.width),
            self.norm,
            EPS,
            self.scale,
            cap=cap,
        )
        program.seal(out_start)
        return program

    def index_scores(self, kv_format: str) -> Array:
        """Scores [rows, positions] of the indexer in float64, of keys as stored; -inf behind a row's own."""
        assert self.index is not None
        assert self.index_norm is not None
        x, n = self.rows[:, self.indexed :].astype(np.float64), len(self.rows)
        angles = np.arange(n)[:, None] * np.linspace(1.0, 0.01, self.turned // 2)
        *queries, keys = np.split(x[:, : -self.index.heads], self.index.heads + 1, axis=1)
        mean, variance = keys.mean(axis=1, keepdims=True), keys.var(axis=1, keepdims=True)
        keys = (keys - mean) / np.sqrt(variance + EPS) * self.index_norm[0] + self.index_norm[1]
        *queries, keys = (
            np.concatenate([_turn(each[:, : self.turned], angles), each[:, self.turned :]], axis=1)
            for each in (*queries, keys)
        )
        keys = as_stored(keys, kv_format)
        weights = x[:, -self.index.heads :]
        scores = sum(weights[:, [h]] * np.maximum(queries[h] @ keys.T, 0) for h in range(self.index.heads))
        return np.where(np.tri(n, dtype=bool), scores, -np.inf)

    def seen(self, kv_format: str) -> Array:
        """True [rows, positions] where a row sees a position."""
        n = len(self.rows)
        if self.index is None:
            return np.tri(n, dtype=bool)
        ranks = np.argsort(np.argsort(-self.index_scores(kv_format), axis=1, kind="stable"), axis=1)
        return np.tri(n, dtype=bool) & (ranks < self.index.chosen)

    def expected(self, cap: float, kv_format: str = "f32") -> Array:
        """From the definition, in float64, before vectors are rounded; keys of the indexer as stored."""
        x, n = self.rows.astype(np.float64), len(self.rows)
        angles = np.arange(n)[:, None] * np.linspace(1.0, 0.01, self.turned // 2)
        vectors = x[:, self.vectors : self.vectors + self.latent]
        vectors = vectors / np.sqrt((vectors**2).mean(axis=1, keepdims=True) + EPS) * self.norm
        keys = np.concatenate(
            [vectors, _turn(x[:, self.indexed - self.turned : self.indexed], angles)], axis=1
        )
        out = []
        for head in range(self.heads):
            first = self.queries + head * self.step + self.turned_from
            own = x[:, head * self.latent : (head + 1) * self.latent]
            query = np.concatenate([own, _turn(x[:, first : first + self.turned], angles)], axis=1)
            scores = query @ keys.T * self.scale
            scores = cap * np.tanh(scores / cap) if cap else scores
            scores[~self.seen(kv_format)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(weights / weights.sum(axis=1, keepdims=True) @ vectors)
        return np.concatenate(out, axis=1)


def as_stored(x: Array, kv_format: str) -> Array:
    if kv_format == "bf16":
        bits = x.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32).astype(np.float64)
    return x.astype(np.float16 if kv_format == "f16" else np.float32).astype(np.float64)


def _turn(x: Array, angles: Array) -> Array:
    a, b = np.split(x, 2, axis=1)
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=1
    )


CASES = [(1, 16, 2, 3), (4, 32, 8, 16), (13, 48, 6, 5), (20, 16, 64, 1), (2, 512, 64, 128)]


@pytest.mark.parametrize(("heads", "latent", "turned", "keys"), CASES)
@pytest.mark.parametrize("kv_format", STORED)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_attention_over_latent_vectors_equals_float64(
    heads: int, latent: int, turned: int, keys: int, kv_format: str, cap: float
) -> None:
    """Prompts beyond a chunk, whose rounding scores and values share."""
    case = Latent(heads, latent, turned, keys, 150)
    want = case.expected(cap)
    for isa_name in isas():
        with isa.using(isa_name):
            got = run(case.program(kv_format, cap), [piece(range(150))])

            assert np.abs(got - want).max() <= 64 * (latent**0.5) * STORED[kv_format] * np.abs(want).max()


@pytest.mark.parametrize(("heads", "latent", "turned", "keys"), CASES)
def test_latent_rows_have_the_same_bits_however_they_come(
    heads: int, latent: int, turned: int, keys: int
) -> None:
    check_same_bits(Latent(heads, latent, turned, keys, 135))


def check_same_bits(case: Latent) -> None:
    """At once, cut, one by one beside another sequence, on every instruction set."""
    n, bits = len(case.rows), {}
    for isa_name in isas():
        with isa.using(isa_name):
            whole = run(case.program("f16"), [piece(range(n))])
            program = case.program("f16")
            cut = [run(program, [piece(range(a, b), a)]) for a, b in ((0, 1), (1, 40), (40, 130))]
            run(program, [piece(range(3), base=256)])
            for i in range(130, n):
                both = run(program, [piece(range(i, i + 1), i), piece(range(4, 5), i - 127, 256)])
                cut.append(both[:1])
            assert (np.concatenate(cut) == whole).all(), isa_name
            bits[isa_name] = whole.tobytes()

    assert len(set(bits.values())) == 1


INDEXED = [
    (CASES[0], Index(1, 2, 1)),
    (CASES[1], Index(8, 16, 24)),
    (CASES[2], Index(17, 10, 130)),
    (CASES[3], Index(5, 128, 40)),
    (CASES[4], Index(64, 64, 127)),
]


@pytest.mark.parametrize(("shape", "index"), INDEXED)
@pytest.mark.parametrize("kv_format", STORED)
def test_rows_see_the_positions_of_the_largest_scores(
    shape: tuple[int, int, int, int], index: Index, kv_format: str
) -> None:
    """Rows whose last chosen position and best other one are too close to tell apart are left out: few."""
    case, n = Latent(*shape, 150, index), 150
    scores = -np.sort(-case.index_scores(kv_format), axis=1)
    sizes = np.abs(np.where(np.isfinite(scores), scores, 0)).max(axis=1)
    gaps = scores[:, index.chosen - 1] - np.where(np.isfinite(scores), scores, -1e9)[:, index.chosen]
    clear = (gaps > 1e-4 * sizes) | (np.arange(n) < index.chosen)
    assert clear.sum() >= 0.9 * n or index.heads == 1
    assert (clear & (np.arange(n) >= index.chosen)).any()
    want = case.expected(0.0, kv_format)
    for isa_name in isas():
        with isa.using(isa_name):
            got = run(case.program(kv_format), [piece(range(n))])

            bound = 64 * shape[1] ** 0.5 * STORED[kv_format] * np.abs(want).max()
            assert np.abs(got - want)[clear].max() <= bound, isa_name


@pytest.mark.parametrize(("shape", "index"), INDEXED)
def test_chosen_positions_are_the_same_however_rows_come(
    shape: tuple[int, int, int, int], index: Index
) -> None:
    check_same_bits(Latent(*shape, 135, index))


def test_of_equal_scores_the_earlier_positions_are_chosen() -> None:
    """An indexer whose weights are all zero: rows see the first `chosen` positions."""
    case = Latent(*CASES[1], 150, Index(8, 16, 24))
    case.rows[:, -8:] = 0
    rank = np.minimum(np.arange(150), 23)

    got = run(case.program("f32"), [piece(range(150))])

    assert (case.seen("f32") == (np.arange(150) <= rank[:, None])).all()
    want = case.expected(0.0)
    assert np.abs(got - want).max() <= 64 * 32**0.5 * STORED["f32"] * np.abs(want).max()


@pytest.mark.parametrize("kv_format", STORED)
@pytest.mark.parametrize("target", [256, 263])
def test_latent_vectors_that_were_copied_are_read_as_they_were(kv_format: str, target: int) -> None:
    case, n = Latent(4, 32, 8, 16, 140, Index(8, 16, 24)), 139
    program = case.program(kv_format)
    team = Team(None, members=2)
    run(program, [piece(range(n))])
    expected = run(program, [piece(range(n, n + 1), n)])

    program.copy_kv(team, 0, target, n)

    assert (run(program, [piece(range(n, n + 1), n, target)]) == expected).all()


@pytest.mark.parametrize(
    ("shape", "kv_format"),
    [
        ({"latent": 24, "head_dim": 32}, "f32"),
        ({"latent": 32, "head_dim": 32}, "f32"),
        ({"latent": 560, "head_dim": 578}, "f32"),
        ({"latent": 16, "head_dim": 19}, "f32"),
        ({"latent": 16, "head_dim": 32, "n_heads": 4, "n_kv_heads": 2}, "f32"),
        ({"latent": 16, "head_dim": 32}, "int8"),
        ({"latent": 16, "head_dim": 48, "index": 15, "chosen": 4}, "f32"),
        ({"latent": 16, "head_dim": 164, "index": 130, "chosen": 4}, "f32"),
        ({"latent": 16, "head_dim": 48, "index": 16, "chosen": 0}, "f32"),
        ({"latent": 16, "head_dim": 32, "index": 16, "chosen": 4}, "f32"),
    ],
)
def test_vectors_that_no_model_has_are_refused(shape: dict[str, int], kv_format: str) -> None:
    with pytest.raises(ProgramError):
        opened(drawn(1, 4, 64), kv_format, **shape)
