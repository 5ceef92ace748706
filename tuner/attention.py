"""Attention benchmark: times attention as a program runs it, layer after layer, each with keys and values of
its own.

Prompts are timed from their first token on; single tokens with POSITIONS behind them, over as many layers
that no cache holds their keys and values, which is how a model finds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.tuner.search.group import Group
from phasewise.tuner.search.space import Arithmetic, Caches

POSITIONS = 512
PROMPT_LAYERS = 4
MOST_LAYERS = 512
MOST_HEAD_DIM = 128

ARITHMETIC = Arithmetic("fma", 1)
KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1, "int4": 0.625, "int16": 2}


def head_dim_of(n: int, k: int) -> int:
    """The largest power of two that fits as the size of a head: a problem does not state the size itself."""
    common = math.gcd(n, k, MOST_HEAD_DIM)
    return max(common, 2)


def attention_group(kv_format: str, n: int, k: int, threads: int, caches: Caches) -> Group:
    """The search's view of the attention of a model on a team of `threads`."""
    return Group(
        format=kv_format,
        n=n,
        k=k,
        threads=threads,
        arithmetics=(ARITHMETIC,),
        kernels={},
        caches=caches,
        weight_bits=round(8 * KV_BYTES[kv_format]),
        default=lambda m: default_attention(n, k, m, threads),
        family="attention",
    )


def default_attention(n: int, k: int, m: int, threads: int) -> Schedule:
    """The kernels' own division of a slice of m rows, as a schedule."""
    fields = _native.default_attention(_shape(n, k, 1), m, POSITIONS if m == 1 else m, threads)
    fields["block_m"] = -(-fields["block_m"] // fields["mr"]) * fields["mr"]
    return Schedule(**fields, compute_path=ARITHMETIC.compute_path, k_parts=1)


def _shape(n: int, k: int, layers: int, vocab: int = 1) -> dict[str, int | float]:
    head_dim = head_dim_of(n, k)
    return {
        "n_layers": layers,
        "n_heads": n // head_dim,
        "n_kv_heads": k // head_dim,
        "head_dim": head_dim,
        "hidden": 1,
        "ffn": 1,
        "vocab": vocab,
        "window": 0,
        "norm_eps": 1e-5,
    }


class TeamAttention:
    """The attention of a problem on a team; `total_bytes` of keys and values for a single token."""

    def __init__(self, team: _native.Team, problem: Problem, total_bytes: int) -> None:
        n, k, kv_bytes = problem.n, problem.k, KV_BYTES[problem.format]
        self._team, self._m = team, problem.m
        positions = POSITIONS if problem.m == 1 else problem.m
        cold = math.ceil(total_bytes / (2 * positions * k * kv_bytes))
        self._layers = min(MOST_LAYERS, cold) if problem.m == 1 else PROMPT_LAYERS
        row = -(-(n + 2 * k) // 16) * 16
        floats = positions * (row + n)
        room = {
            "kv_slots": positions,
            "max_tokens": positions,
            "max_slices": 1,
            "max_logit_rows": 1,
            "max_threads": team.size,
            "kv_format": problem.format,
        }
        head_dim = head_dim_of(n, k)
        self._program = _native.Program(
            _shape(n, k, self._layers, vocab=floats), room, 1e4 ** (-np.arange(0, 1, 2 / head_dim))
        )
        for layer in range(self._layers):
            self._program.attend(layer, 0, row, positions * row, n)
        self._program.seal(0)
        memory: npt.NDArray[np.float32] = np.asarray(self._program)[0]  # all the rows, read as logits
        memory[: positions * row] = np.random.default_rng(2).uniform(-1, 1, positions * row)
        self._out = memory[positions * row :]
        self._program.run(team, [_slice(0, positions)])
        self._step = [_slice(positions - problem.m, problem.m)]
        self._program.run(team, self._step)
        self._expected = self._out.copy()

    def run(self, walk: Mapping[str, int | str], calls: int) -> npt.NDArray[np.int64]:
        """Nanoseconds of each of `calls` calls: the mean over layers of one pass through all of them."""
        self._program.set_attention_schedules([(self._m, walk)])
        taken = np.empty(calls, np.int64)
        for call in range(calls):
            before = self._program.native_ns
            self._program.run(self._team, self._step)
            taken[call] = (self._program.native_ns - before) // self._layers
        return taken

    def is_right(self) -> bool:
        """True if the last call gave what the default gives."""
        return np.array_equal(self._out, self._expected)


def _slice(start: int, rows: int) -> Any:
    return SimpleNamespace(
        token_ids=[0] * rows,
        start=start,
        slot_base=0,
        wants_logits=False,
        table=None,
        n_drafted=0,
        ring=None,
        adapter=0,
    )
