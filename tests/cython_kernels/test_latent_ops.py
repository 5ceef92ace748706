"""Latent attention and products by head as ops of a program, beside float64, on every instruction set."""

from __future__ import annotations

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
    angles = np.linspace(1.0, 0.01, (sizes["head_dim"] - sizes.get("latent", 0)) // 2)
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


class Latent:
    """Rows of a stream that hold all that attention over latent vectors reads."""

    def __init__(self, heads: int, latent: int, turned: int, keys: int, n: int) -> None:
        self.heads, self.latent, self.turned, self.step, self.turned_from = (
            heads,
            latent,
            turned,
            keys + turned,
            keys,
        )
        self.queries = heads * latent
        self.vectors = self.queries + heads * self.step
        self.width = self.vectors + latent + turned
        self.rows, self.norm = drawn(3, n, self.width), 1 + 0.1 * drawn(4, latent)
        self.scale = (keys + turned) ** -0.5

    def program(self, kv_format: str, cap: float = 0.0) -> Program:
        """A program whose outputs are what is read of the vectors."""
        out = self.heads * self.latent
        program = opened(
            self.rows, kv_format, n_heads=self.heads, head_dim=self.latent + self.turned,
            latent=self.latent, outputs=out,
        )  # fmt: skip
        out_start = len(self.rows) * self.width
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

    def expected(self, cap: float) -> Array:
        """From the definition, in float64, before vectors are rounded."""
        x, n = self.rows.astype(np.float64), len(self.rows)
        angles = np.arange(n)[:, None] * np.linspace(1.0, 0.01, self.turned // 2)
        vectors = x[:, self.vectors : self.vectors + self.latent]
        vectors = vectors / np.sqrt((vectors**2).mean(axis=1, keepdims=True) + EPS) * self.norm
        keys = np.concatenate([vectors, _turn(x[:, self.vectors + self.latent :], angles)], axis=1)
        out = []
        for head in range(self.heads):
            first = self.queries + head * self.step + self.turned_from
            own = x[:, head * self.latent : (head + 1) * self.latent]
            query = np.concatenate([own, _turn(x[:, first : first + self.turned], angles)], axis=1)
            scores = query @ keys.T * self.scale
            scores = cap * np.tanh(scores / cap) if cap else scores
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(weights / weights.sum(axis=1, keepdims=True) @ vectors)
        return np.concatenate(out, axis=1)


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
    """At once, cut, one by one beside another sequence, on every instruction set."""
    n = 135
    case, bits = Latent(heads, latent, turned, keys, n), {}
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


@pytest.mark.parametrize("kv_format", STORED)
@pytest.mark.parametrize("target", [256, 263])
def test_latent_vectors_that_were_copied_are_read_as_they_were(kv_format: str, target: int) -> None:
    case, n = Latent(4, 32, 8, 16, 140), 139
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
    ],
)
def test_vectors_that_no_model_has_are_refused(shape: dict[str, int], kv_format: str) -> None:
    with pytest.raises(ProgramError):
        opened(drawn(1, 4, 64), kv_format, **shape)
