"""Ops that families bring: adjusted rows and experts, beside float64, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from phasewise.cython_kernels import isa, packing
from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.errors import ProgramError
from phasewise.serving.batch import SequenceSlice
from tests.support.tiers import isas

N_TOKENS = 5
EPS = 1e-5
SCORES = ("softmax", "logistic")
Array = np.ndarray


@dataclass(frozen=True)
class Mixture:
    """As `serving.models.parts.experts.Experts`."""

    count: int
    chosen: int
    normalised: bool
    scores: str = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    scale: float = 1.0
    weighs_inputs: bool = False


def opened(width: int, rows: Array) -> Program:
    """A program whose stream is `rows`: token i embeds as row i, at the arena's start. Logits are as wide."""
    shape = {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 8, "hidden": width, "ffn": width}
    room = {"kv_slots": 16, "max_tokens": N_TOKENS, "max_slices": 1, "max_logit_rows": N_TOKENS}
    program = Program(
        {**shape, "vocab": width, "norm_eps": EPS}, {**room, "max_threads": 2, "kv_format": "f32"}, np.ones(4)
    )
    table = np.zeros((max(width, N_TOKENS), width), np.float32)
    table[:N_TOKENS] = rows
    program.embed(packing.pack_dense(table, "f32"), 0, width)
    return program


def computed(program: Program, offset: int) -> Array:
    """The rows at an offset of the arena, after a step of all tokens."""
    program.seal(offset)
    piece = SequenceSlice(list(range(N_TOKENS)), 0, 0, wants_logits=True)
    n_rows = program.run(Team(None, members=2), [piece], every_row=True)
    return np.asarray(program)[:n_rows].copy()


def drawn(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normalised(rows: Array, weights: Array) -> Array:
    rows = rows.astype(np.float64)
    return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPS) * weights


@pytest.mark.parametrize("width", [5, 15, 16, 17, 67, 256])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("add", [False, True])
def test_adjusted_rows_equal_float64(width: int, norm: bool, bias: bool, cap: float, add: bool) -> None:
    """Norm, bias, cap and sum, each with and without the others; a few operations of float32 each."""
    rows, weights, biases = drawn(width, N_TOKENS, width), drawn(1, width), drawn(2, width)
    want = normalised(rows, weights) if norm else rows.astype(np.float64)
    want = want + biases if bias else want
    want = cap * np.tanh(want / cap) if cap else want
    for isa_name in isas():
        with isa.using(isa_name):
            program = opened(width, rows)
            out = 0 if add else N_TOKENS * width
            program.adjust(
                width, 0, width, out, width,
                norm=weights if norm else None, bias=biases if bias else None, cap=cap, add=add,
            )  # fmt: skip
            got = computed(program, out)
            expected = want + rows if add else want
            error = np.abs(got - expected).max()
            assert error <= (width + 32) * 2.0**-24 * max(1.0, np.abs(expected).max()), isa_name


MIXTURES = [
    *(Mixture(8, chosen, normalised) for chosen in (1, 3, 8) for normalised in (False, True)),
    *(Mixture(8, 3, normalised, scores, scale=2.5) for normalised in (False, True) for scores in SCORES),
    *(
        Mixture(12, chosen, True, scores, groups, 2, best, 0.5)
        for chosen, groups, best in ((1, 2, 1), (3, 4, 2), (6, 3, 3), (8, 3, 1))
        for scores in SCORES
    ),
    Mixture(12, 4, False, "softmax", 6, 2, 1, 16.0),
    *(Mixture(8, chosen, False, "logistic", weighs_inputs=True) for chosen in (1, 3)),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_routed_experts_equal_float64(mixture: Mixture, biased: bool, alone: bool) -> None:
    """Router, gathered products of the chosen experts, gate and weighted sum, in float32.

    alone: experts have factors of their own, and their sum takes the place of the row.
    """
    width, ffn, count, chosen = 32, 16, mixture.count, mixture.chosen
    bias = drawn(7, count) if biased else None
    factors = drawn(8, count) if alone else None
    rows = drawn(3, N_TOKENS, width)
    router, up, down = drawn(4, count, width), drawn(5, count, 2 * ffn, width), drawn(6, count, width, ffn)
    want = _mixture(rows, router, up, down, mixture, (bias, factors)) + (0 if alone else rows)
    for isa_name in isas():
        with isa.using(isa_name):
            program = opened(width, rows)
            stride, start = 64, N_TOKENS * width
            scores, pairs = (start, stride), (start + N_TOKENS * stride, stride)
            given = pairs[0] + N_TOKENS * chosen * stride, stride
            program.linear([(packing.pack_dense(router, "f32"), 0)], "rows", 0, width, *scores)
            program.route(mixture, *scores, choice_bias=bias, factors=factors)
            stacks = [packing.pack_dense(stack.reshape(-1, stack.shape[2]), "f32") for stack in (up, down)]
            program.experts(mixture, stacks[0], "rows", 0, width, *pairs)
            program.experts(mixture, stacks[1], "gate", *pairs, *given)
            program.combine(mixture, width, *given, 0, width, add=not alone)
            got = computed(program, 0)
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), isa_name


def _mixture(
    rows: Array,
    router: Array,
    up: Array,
    down: Array,
    mixture: Mixture,
    of_experts: tuple[Array | None, Array | None],
) -> Array:
    """From the definition, one row and one expert at a time, in float64. of_experts: biases, factors."""
    x, (bias, factors) = rows.astype(np.float64), of_experts
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        logits = router.astype(np.float64) @ row
        of_all = np.exp(logits - logits.max())
        scores = of_all / of_all.sum() if mixture.scores == "softmax" else 1 / (1 + np.exp(-logits))
        best = _chosen(scores if bias is None else scores + bias, mixture)
        weights = scores[best] * mixture.scale
        if mixture.normalised:
            weights /= scores[best].sum()
        weights = weights if factors is None else weights * factors[best]
        for weight, expert in zip(weights, best, strict=True):
            before, behind = (weight, 1.0) if mixture.weighs_inputs else (1.0, weight)
            gate, value = np.split(up[expert].astype(np.float64) @ (before * row), 2)
            out[i] += behind * (down[expert].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * value))
    return out


def _chosen(numbers: Array, mixture: Mixture) -> Array:
    groups = numbers.reshape(mixture.groups, -1)
    worth = np.sort(groups, axis=1)[:, -mixture.group_best :].sum(axis=1)
    left_out = np.argsort(-worth)[mixture.chosen_groups :]
    kept = groups.copy()
    kept[left_out] = -np.inf
    return np.argsort(-kept.reshape(-1))[: mixture.chosen]


@pytest.mark.parametrize(
    "mixture",
    [
        Mixture(1025, 1, True),
        Mixture(8, 9, True),
        Mixture(8, 2, True, groups=3),
        Mixture(8, 2, True, groups=0),
        Mixture(8, 2, True, groups=4, chosen_groups=5),
        Mixture(8, 2, True, groups=4, chosen_groups=0),
        Mixture(8, 5, True, groups=4, chosen_groups=2),
        Mixture(8, 2, True, groups=4, chosen_groups=2, group_best=3),
    ],
    ids=str,
)
def test_groups_that_no_mixture_has_are_refused(mixture: Mixture) -> None:
    program = opened(32, drawn(1, N_TOKENS, 32))

    with pytest.raises(ProgramError):
        program.route(mixture, 0, 2048)
