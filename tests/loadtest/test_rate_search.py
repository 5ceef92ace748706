"""The search for the highest rate, on landscapes whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.loadtest.rate_search import LEAST_RATE, MOST_RATE, RateSearch, find_rate


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
