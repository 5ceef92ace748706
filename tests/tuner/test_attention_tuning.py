"""Attention's schedules: all candidates are legal, every one is timed once, and none changes a result."""

from __future__ import annotations

import pytest

from phasewise.kerneldb.records import Problem, Sample
from phasewise.tuner.attention import (
    TeamAttention,
    attention_grid,
    attention_group,
    candidates,
    default_attention,
    head_dim_of,
    tune_attention,
)
from phasewise.tuner.native import NativeEvaluator
from phasewise.tuner.search.protocol import SearchOptions, TimingBatch, drive
from phasewise.tuner.search.space import Caches

_native = pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)

CACHES = Caches(32 << 10, 1 << 20)


@pytest.mark.parametrize(
    ("n", "k", "head_dim"), [(576, 192, 64), (4096, 1024, 128), (32, 16, 16), (50, 10, 2)]
)
def test_heads_divide_what_all_heads_have(n: int, k: int, head_dim: int) -> None:
    assert head_dim_of(n, k) == head_dim


@pytest.mark.parametrize(
    ("kv_format", "m"), [("f16", 1), ("f16", 40), ("f16", 128), ("int4", 1), ("int4", 40)]
)
def test_no_candidate_changes_a_bit(kv_format: str, m: int) -> None:
    problem = Problem("attention", kv_format, 64, 32, m)
    attention = TeamAttention(_native.Team(None, members=2), problem, 1 << 16)

    for schedule in candidates(default_attention(64, 32, m, 2), m):
        assert attention.run(schedule.walk, 2).min() > 0
        assert attention.is_right()


def test_the_search_finds_the_fastest_candidate_and_asks_for_each_take_once() -> None:
    group = attention_group("f16", 576, 192, 2, CACHES)
    search, asked = tune_attention(group, attention_grid(512), SearchOptions()), set()

    def answer(ask: TimingBatch) -> list[Sample]:
        keys = set(zip([ask.m] * len(ask.takes), ask.schedules, ask.takes, strict=True))
        assert not keys & asked
        asked.update(keys)
        costs = [
            1000 + abs(schedule.block_m - 24) + schedule.mr + abs(schedule.block_k - 512)
            for schedule in ask.schedules
        ]
        pairs = zip(ask.schedules, costs, strict=True)
        return [Sample(schedule, (cost,), cost, None, 1) for schedule, cost in pairs]

    best = drive(search, answer).best

    assert set(best) == {1, 128, 256, 512}
    assert (best[128].mr, best[128].block_m, best[1].block_k) == (4, 24, 512)


def test_the_evaluator_times_and_compares_attention() -> None:
    problem = Problem("attention", "f16", 64, 32, 1)
    default, other = list(candidates(default_attention(64, 32, 1, 1), 1))[:2]
    evaluator = NativeEvaluator((0,), 1 << 16)
    try:
        samples = evaluator.measure(problem, [default, other])
        comparison = evaluator.duel(problem, default, other).comparison
    finally:
        evaluator.close()

    assert [sample.schedule for sample in samples] == [default, other]
    assert comparison.gain > 0
