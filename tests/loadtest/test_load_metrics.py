"""The figures of `bench serve` against their definitions; its search for a rate on known landscapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.loadtest.metrics import (
    FailureKind,
    Measured,
    RequestOutcome,
    attainment,
    failures,
    flat_result,
    is_kept,
)
from phasewise.loadtest.rate_search import LEAST_RATE, MOST_RATE, RateSearch, find_rate
from phasewise.loadtest.session import longest_s
from phasewise.tuner.config.slo import LatencyBounds

SLO = LatencyBounds(200.0, 50.0)

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
    assert longest_s(LatencyBounds(200, 50), 11) == pytest.approx(0.7)
    assert longest_s(LatencyBounds(200, 50, 300), 11) == pytest.approx(0.3)
    assert longest_s(LatencyBounds(200), 11) is None


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


def searched(keeps: Callable[[float], bool], search: RateSearch) -> tuple[float | None, dict[float, bool]]:
    """The rate that is found, and the verdict on each rate that was asked about."""
    asked: dict[float, bool] = {}
    rates = find_rate(search)
    try:
        rate = next(rates)
        while True:
            asked[rate] = keeps(rate)
            rate = rates.send(asked[rate])
    except StopIteration as end:
        return end.value, asked


@given(edge=st.floats(0.05, 5000), start=st.floats(0.05, 5000), resolution=st.floats(0.01, 0.3))
def test_one_edge_is_found_within_the_resolution(edge: float, start: float, resolution: float) -> None:
    """Wherever it begins, and never above the edge."""
    search = RateSearch(start, 2.0, resolution, most_probes=100, least_share=1e-9)

    best_rate, _ = searched(lambda rate: rate <= edge, search)

    assert best_rate is not None
    assert edge * (1 - resolution) - 1e-9 <= best_rate <= edge


@given(
    verdicts=st.lists(st.booleans(), min_size=30, max_size=30),
    most=st.integers(1, 20),
    votes=st.integers(1, 5),
)
def test_whatever_the_landscape_the_answer_was_kept_more_often_than_not(
    verdicts: list[bool], most: int, votes: int
) -> None:
    """A noisy server may contradict itself; the search ends, and claims only what it saw."""
    answers = iter(verdicts)
    seen: list[tuple[float, bool]] = []

    def keeps(rate: float) -> bool:
        seen.append((rate, next(answers)))
        return seen[-1][1]

    best_rate, _ = searched(keeps, RateSearch(most_probes=most, votes=votes))

    assert len(seen) <= most
    of_found = [kept for rate, kept in seen if rate == best_rate]
    assert best_rate is None or 2 * sum(of_found) > len(of_found)
    if votes == 1:
        assert (best_rate is None) == (not any(kept for _, kept in seen))


@given(
    edge=st.floats(0.5, 50),
    lies=st.lists(st.integers(0, 30), max_size=3, unique=True),
    start=st.floats(0.5, 50),
)
def test_one_probe_that_lies_does_not_decide(edge: float, lies: list[int], start: float) -> None:
    """Both rates at which a search ends were asked until no single answer more could overturn them."""
    seen: list[tuple[float, bool]] = []

    def keeps(rate: float) -> bool:
        seen.append((rate, (rate <= edge) != (len(seen) in lies)))
        return seen[-1][1]

    search = RateSearch(start, votes=2 * len(lies) + 1, most_probes=1000, least_share=1e-9)
    best_rate, _ = searched(keeps, search)

    assert best_rate is not None
    assert edge * (1 - search.resolution) - 1e-9 <= best_rate <= edge


def test_a_server_that_keeps_nothing_is_left_alone_soon() -> None:
    best_rate, asked = searched(lambda _rate: False, RateSearch(start=8.0, most_probes=50))

    assert best_rate is None
    assert min(asked) == pytest.approx(8.0 / 64)
    assert len(asked) == 7


def test_a_server_without_a_limit_ends_at_the_highest_rate() -> None:
    best_rate, _ = searched(lambda _rate: True, RateSearch(most_probes=100))

    assert best_rate == MOST_RATE


def test_no_rate_is_out_of_range() -> None:
    _, asked = searched(lambda _rate: False, RateSearch(start=1e-9, most_probes=100))

    assert min(asked) >= LEAST_RATE


def test_probes_are_spent_between_what_was_kept_and_what_was_missed() -> None:
    _, asked = searched(lambda rate: rate <= 11, RateSearch(start=1.0, most_probes=100))

    rates = list(asked)
    assert rates[:5] == [1, 2, 4, 8, 16]
    for index, rate in enumerate(rates[5:], 5):
        kept = max(earlier for earlier in rates[:index] if asked[earlier])
        missed = min(earlier for earlier in rates[:index] if not asked[earlier])
        assert kept < rate < missed
