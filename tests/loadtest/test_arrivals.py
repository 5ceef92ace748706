"""`bench serve` sends as it is told: arrivals keep their rate and spread, traces their order."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.loadtest.metrics import FailureKind, RequestOutcome, hit_rate
from phasewise.loadtest.prompts import IdPrompts, TextPrompts
from phasewise.loadtest.send import RequestPace, poisson_arrivals_s
from phasewise.loadtest.session import instants_of, parse_slo, repeated
from phasewise.tuner.config.lengths import RequestLengths
from phasewise.tuner.config.slo import LatencyBounds
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.config.trace_files import read_trace as read_trace_file
from phasewise.tuner.errors import TraceError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,100,10
2023-11-16 18:15:48.6805900,200,20
2023-11-16 18:15:47.6805900,300,30
"""
MOONCAKE = '{"timestamp": 500, "input_length": 40, "output_length": 4}\n' * 2


@given(rate=st.floats(0.01, 1000), count=st.integers(1, 200), seed=st.integers(0, 1 << 30))
def test_arrivals_ascend_and_end_when_the_rate_says(rate: float, count: int, seed: int) -> None:
    """However short a run is, its rate is the one asked for."""
    instants_s = poisson_arrivals_s(rate, count, random.Random(seed))

    assert len(instants_s) == count
    assert all(before <= after for before, after in pairwise(instants_s))
    assert instants_s[0] >= 0
    assert instants_s[-1] == pytest.approx(count / rate)


def test_gaps_have_the_spread_of_a_poisson_process() -> None:
    """A coefficient of variation of 1."""
    instants_s = RequestPace(20.0).arrivals_s(20_000, 3)
    gaps_s = [after - before for before, after in pairwise(instants_s)]

    mean_s = statistics.fmean(gaps_s)
    assert mean_s == pytest.approx(1 / 20, rel=0.03)
    assert statistics.pstdev(gaps_s) / mean_s == pytest.approx(1.0, rel=0.05)


def test_the_same_seed_draws_the_same_arrivals() -> None:
    pace = RequestPace(5.0)

    assert pace.arrivals_s(20, 1) == pace.arrivals_s(20, 1) != pace.arrivals_s(20, 2)


@pytest.mark.parametrize(("name", "text"), [("azure.csv", AZURE), ("mooncake.jsonl", MOONCAKE)])
def test_a_replay_keeps_order_times_and_lengths(tmp_path: Path, name: str, text: str) -> None:
    """By arrival, from nought on."""
    (tmp_path / name).write_text(text)
    trace = read_trace(tmp_path / name)

    replayed = repeated(trace, len(trace))

    ordered = sorted(trace, key=lambda arrival: arrival.arrival_s or 0.0)
    assert [request.prompt_tokens for request in replayed] == [request.prompt_tokens for request in ordered]
    assert [request.output_tokens for request in replayed] == [request.output_tokens for request in ordered]
    assert instants_of(replayed) == pytest.approx([request.arrival_s or 0.0 for request in ordered])


@given(gaps_s=st.lists(st.floats(0, 100), min_size=1, max_size=20), count=st.integers(1, 100))
def test_a_trace_that_is_too_short_starts_over_after_its_mean_gap(gaps_s: list[float], count: int) -> None:
    """Arrivals go on ascending, and no request is left out of a pass."""
    at_s, trace = 0.0, []
    for number, gap_s in enumerate(gaps_s):
        trace.append(RequestLengths(number + 1, 1, at_s))
        at_s += gap_s

    replayed = repeated(tuple(trace), count)

    instants_s = instants_of(replayed)
    assert instants_s is not None
    assert all(after >= before - 1e-9 for before, after in pairwise(instants_s))
    assert [request.prompt_tokens for request in replayed] == [
        index % len(trace) + 1 for index in range(count)
    ]


def test_lengths_alone_have_no_arrivals() -> None:
    assert instants_of((RequestLengths(3, 4), RequestLengths(5, 6, 1.0))) is None


def test_promises_are_read() -> None:
    assert parse_slo("ttft:2000,tpot:280") == LatencyBounds(2000, 280)
    assert parse_slo("ttft=2s tpot=280ms") == LatencyBounds(2000, 280)
    assert parse_slo("e2el:500") == LatencyBounds(e2el_ms=500)
    assert parse_slo(LatencyBounds(1.5, 2, 3).describe()) == LatencyBounds(1.5, 2, 3)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:0", "ttft:nan", "ttft:1,ttft:2", "itl:3", "tpot:-1", "ttft.p99=1s"]
)
def test_promises_without_meaning_are_refused(text: str) -> None:
    with pytest.raises(TraceError, match="SLO"):
        parse_slo(text)


block_lists = st.lists(st.integers(0, 5), max_size=4)


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """Items that both begin with."""
    for index, (mine, others) in enumerate(zip(first, second, strict=False)):
        if mine != others:
            return index
    return min(len(first), len(second))


@given(block_lists, block_lists, st.integers(1, 200), st.integers(1, 40))
def test_prompts_of_equal_blocks_begin_with_equal_tokens(
    first_blocks: list[int], second_blocks: list[int], n_tokens: int, block_tokens: int
) -> None:
    """And with no more than that, up to a chance token."""
    both = (first_blocks, second_blocks)
    requests = [RequestLengths(n_tokens, 1, None, tuple(blocks), block_tokens) for blocks in both]
    first, second = (IdPrompts(3)(index, request) for index, request in enumerate(requests))

    shared = min(n_tokens, common(first_blocks, second_blocks) * block_tokens)
    assert len(first) == len(second) == n_tokens
    assert shared <= common(first, second) <= shared + 4
    texts = [TextPrompts(3)(index, request) for index, request in enumerate(requests)]
    words = [str(text).split() for text in texts]
    assert [len(text) for text in words] == [n_tokens, n_tokens]
    assert common(*words) >= shared


def test_a_mooncake_trace_says_which_prompts_begin_alike(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 10, "input_length": 1300, "output_length": 6, "hash_ids": [7, 8, 10]},
        {"timestamp": 20, "input_length": 30, "output_length": 6},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    first, second, third = read_trace_file(path)

    assert (first.blocks, second.blocks, third.blocks) == ((7, 8, 9), (7, 8, 10), ())
    assert (first.prompt_tokens, first.block_tokens) == (1200, 512)
    for wrong in ([1] * 9, "abc", [-1], [1.5], [True]):
        path.write_text(json.dumps({**rows[0], "hash_ids": wrong}))
        with pytest.raises(TraceError, match="hash_ids"):
            read_trace_file(path)


def test_hit_rates_count_tokens_of_what_was_answered_and_told() -> None:
    outcomes = [
        RequestOutcome(0, 100, cached_tokens=0),
        RequestOutcome(0, 300, cached_tokens=150),
        RequestOutcome(0, 50),
        RequestOutcome(0, 50, cached_tokens=50, failure=FailureKind.timeout),
    ]

    assert hit_rate(outcomes) == 150 / 400
    assert hit_rate(outcomes[2:]) is None
