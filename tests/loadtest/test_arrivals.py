"""`bench serve` sends as it is told: arrivals keep their rate and spread, traces their order."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.loadtest.arrivals import (
    LatencySlo,
    RequestPace,
    instants_of,
    parse_slo,
    poisson_arrivals_s,
    repeated,
)
from phasewise.tuner.config.lengths import RequestLengths
from phasewise.tuner.config.trace import read_trace
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
    assert parse_slo("ttft:2000,tpot:280") == LatencySlo(2000, 280)
    assert parse_slo("ttft=2s tpot=280ms") == LatencySlo(2000, 280)
    assert parse_slo("e2el:500") == LatencySlo(e2el_ms=500)
    assert parse_slo(LatencySlo(1.5, 2, 3).describe()) == LatencySlo(1.5, 2, 3)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:0", "ttft:nan", "ttft:1,ttft:2", "itl:3", "tpot:-1", "ttft.p99=1s"]
)
def test_promises_without_meaning_are_refused(text: str) -> None:
    with pytest.raises(TraceError, match="SLO"):
        parse_slo(text)
