"""The timing of attention as a program runs it, layer after layer with keys and values of their own, and the
search for its division.

Prompts are timed from their first token on; single tokens with POSITIONS positions behind them, over so many
layers that no cache holds their keys and values, as in a model.

Few numbers of a schedule matter to attention, so every sensible choice is timed: for single tokens the
positions of a piece, for longer slices the query rows of a tile and of a piece."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Sample, Schedule
from phasewise.tuner.search.group import Group, GroupOutcome, ScheduleCache
from phasewise.tuner.search.protocol import GroupSearch, SearchOptions, TimingBatch, fastest
from phasewise.tuner.search.space import Arithmetic, Caches

POSITIONS = 512
PROMPT_LAYERS = 4
MOST_LAYERS = 512
MOST_HEAD_DIM = 128

ARITHMETIC = Arithmetic("fma", 1)
KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1, "int4": 0.625, "int16": 2}


def head_dim_of(n: int, k: int) -> int:
    """The largest power of two that fits as the size of a head, which a problem does not state."""
    common = math.gcd(n, k, MOST_HEAD_DIM)
    return max(common, 2)


def attention_group(kv_format: str, n: int, k: int, threads: int, caches: Caches) -> Group:
    """The attention of a model on a team of `threads`, as a search sees it."""
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
    """The kernels' own division of the attention of m query rows, as a schedule."""
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
    """The attention of a problem on a team. `total_bytes`: of the keys and values behind a token."""

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
        memory: npt.NDArray[np.float32] = np.asarray(self._program)[0]  # all rows, read as logits
        memory[: positions * row] = np.random.default_rng(2).uniform(-1, 1, positions * row)
        self._out = memory[positions * row :]
        self._program.run(team, [_slice(0, positions)])
        self._step = [_slice(positions - problem.m, problem.m)]
        self._program.run(team, self._step)
        self._expected = self._out.copy()

    def run(self, walk: Mapping[str, int | str], calls: int) -> npt.NDArray[np.int64]:
        """Nanoseconds of each of `calls` passes through all layers, as the mean over layers."""
        self._program.set_attention_schedules([(self._m, walk)])
        taken = np.empty(calls, np.int64)
        for call in range(calls):
            before = self._program.native_ns
            self._program.run(self._team, self._step)
            taken[call] = (self._program.native_ns - before) // self._layers
        return taken

    def is_right(self) -> bool:
        """True if the last call gave the default schedule's result."""
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


CHUNK = 128
"""The fewest positions of a piece of attention (PW_CHUNK)."""

PIECE_CHUNKS = (1, 2, 4, 8, 16)
PIECE_ROWS = (12, 24, 48, 96)
TILE_ROWS = (12, 6, 4)


def attention_grid(max_m: int) -> tuple[int, ...]:
    """The numbers of query rows to tune for: a token's 1, and prompts'; 128 and more serve longer slices."""
    return tuple(m for m in (1, 128, 256, 512) if m <= max_m)


def candidates(default: Schedule, m: int) -> Iterator[Schedule]:
    """The schedules to time for m query rows, the default first."""
    yield default
    if m == 1:
        others = [replace(default, block_k=chunks * CHUNK) for chunks in PIECE_CHUNKS]
    else:
        others = [replace(default, mr=mr, block_m=rows) for mr in TILE_ROWS for rows in PIECE_ROWS]
    yield from (schedule for schedule in dict.fromkeys(others) if schedule != default)


def tune_attention(
    group: Group, ms: Sequence[int], options: SearchOptions, cache: ScheduleCache | None = None
) -> GroupSearch[GroupOutcome]:
    """Time every candidate for each m, in batches that begin with the best schedule so far."""
    best: dict[int, Schedule] = {}
    for m in ms:
        waiting = list(candidates(group.default(m), m))
        leader, waiting = waiting[0], waiting[1:]
        take = 0
        while waiting:
            batch, waiting = waiting[: options.batch - 1], waiting[options.batch - 1 :]
            takes = (take, *(0 for _ in batch))
            samples: list[Sample] = yield TimingBatch(m, (leader, *batch), takes)
            winner = fastest(samples).schedule
            leader, take = winner, take + 1 if winner == leader else 1
        best[m] = leader
    return GroupOutcome(group.arithmetics[0], best, ())
