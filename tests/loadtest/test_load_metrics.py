"""The figures of `bench serve` against their definitions, written out plainly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.loadtest.arrivals import LatencySlo
from phasewise.loadtest.metrics import (
    FailureKind,
    Measured,
    RequestOutcome,
    attainment,
    failures,
    flat_result,
    is_kept,
)
from phasewise.loadtest.session import longest_s

SLO = LatencySlo(200.0, 50.0)

seconds = st.floats(0.0001, 5.0)


@st.composite
def outcomes(draw: st.DrawFn) -> RequestOutcome:
    """Any answer: whole or failed, of a token or of many, several tokens an event or one."""
    start_s, ttft_s = draw(st.floats(0, 50)), draw(seconds)
    itls_s = draw(st.lists(seconds, max_size=12))
    failure = draw(st.sampled_from([None, None, None, *FailureKind]))
    return RequestOutcome(
        start_s,
        draw(st.integers(1, 4000)),
        draw(st.integers(0, 3)) + len(itls_s),
        ttft_s,
        ttft_s + sum(itls_s),
        itls_s,
        failure=failure,
    )


def quantile(values: list[float], share: float) -> float:
    """Linear between the two nearest, as numpy and vLLM have it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def naive(samples_s: list[float], name: str) -> dict[str, float]:
    ms = [1000 * value for value in samples_s] or [0.0]
    mean = math.fsum(ms) / len(ms)
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": quantile(ms, 0.5),
        f"std_{name}_ms": math.sqrt(math.fsum((value - mean) ** 2 for value in ms) / len(ms)),
        **{f"p{rank}_{name}_ms": quantile(ms, rank / 100) for rank in (50, 90, 99)},
    }


@given(all_outcomes=st.lists(outcomes(), max_size=30), duration_s=st.floats(0.1, 100))
def test_every_figure_is_its_definition(all_outcomes: list[RequestOutcome], duration_s: float) -> None:
    """Latencies of whole answers alone; throughput over the run's whole duration."""
    result = flat_result(Measured(all_outcomes, duration_s, 0.1), SLO)

    whole = [outcome for outcome in all_outcomes if outcome.failure is None]
    tpots = [
        (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)
        for outcome in whole
        if outcome.output_tokens > 1
    ]
    expected: dict[str, float] = {
        "completed": len(whole),
        "failed": len(all_outcomes) - len(whole),
        "total_input_tokens": sum(outcome.prompt_tokens for outcome in whole),
        "total_output_tokens": sum(outcome.output_tokens for outcome in whole),
        "request_throughput": len(whole) / duration_s,
        "output_throughput": sum(outcome.output_tokens for outcome in whole) / duration_s,
        "total_token_throughput": sum(outcome.prompt_tokens + outcome.output_tokens for outcome in whole)
        / duration_s,
        **naive([outcome.ttft_s for outcome in whole], "ttft"),
        **naive(tpots, "tpot"),
        **naive([gap_s for outcome in whole for gap_s in outcome.itls_s], "itl"),
        **naive([outcome.latency_s for outcome in whole], "e2el"),
    }
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-6), name


@given(all_outcomes=st.lists(outcomes(), min_size=1, max_size=30))
def test_goodput_counts_whole_answers_that_kept_everything(all_outcomes: list[RequestOutcome]) -> None:
    """A single token has no TPOT and keeps any; what failed keeps nothing."""
    good = 0
    for outcome in all_outcomes:
        tpot_s = (
            (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)
            if outcome.output_tokens > 1
            else 0.0
        )
        good += outcome.failure is None and outcome.ttft_s <= 0.2 and tpot_s <= 0.05

    assert flat_result(Measured(all_outcomes, 4.0, 0.0), SLO)["request_goodput"] == pytest.approx(good / 4)
    assert attainment(all_outcomes, SLO) == pytest.approx(good / len(all_outcomes))


def test_each_promise_is_judged_by_itself_at_p90() -> None:
    """One of ten may miss its TTFT and another its TPOT; two of one kind may not."""
    good = RequestOutcome(0, 8, 3, 0.1, 0.16, [0.03, 0.03])
    slow_start = RequestOutcome(0, 8, 3, 0.3, 0.36, [0.03, 0.03])
    slow_tokens = RequestOutcome(0, 8, 3, 0.1, 0.4, [0.15, 0.15])

    assert is_kept([good] * 8 + [slow_start, slow_tokens], SLO)
    assert not is_kept([good] * 8 + [slow_start] * 2, SLO)
    assert not is_kept([], SLO)


def test_who_takes_longest_has_broken_a_promise() -> None:
    assert longest_s(LatencySlo(200, 50), 11) == pytest.approx(0.7)
    assert longest_s(LatencySlo(200, 50, 300), 11) == pytest.approx(0.3)
    assert longest_s(LatencySlo(200), 11) is None


def test_the_busiest_second_is_found() -> None:
    """Two requests of three tokens that overlap for a while."""
    overlapping = [
        RequestOutcome(10.0, 1, 3, 0.1, 0.3, [0.1, 0.1]),
        RequestOutcome(10.2, 1, 3, 0.1, 1.5, [0.2, 1.2]),
    ]

    result = flat_result(Measured(overlapping, 2.0, 0.0), None)

    assert result["max_output_tokens_per_s"] == 5
    assert result["max_concurrent_requests"] == 2
    assert result["request_goodput"] is None


def test_failures_are_counted_by_kind() -> None:
    failed = [
        RequestOutcome(0, 1, failure=kind)
        for kind in (FailureKind.timeout, FailureKind.refused, FailureKind.timeout)
    ]

    assert failures(failed) == {"timeout": 2, "refused": 1}
