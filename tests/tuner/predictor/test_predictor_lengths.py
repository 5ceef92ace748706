"""Room by price, uncertainty, and what follows from realised lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.tuner.predictor.distribution import (
    LengthDistribution,
    RunningPrice,
    RunningRatio,
    price_holding,
)

shares = st.lists(st.floats(0.001, 1), min_size=2, max_size=12)
prices = st.floats(0, 0.2)


def a_distribution(parts: list[float], limit: int) -> LengthDistribution:
    bounds = np.cumsum(10.0 * np.arange(1, len(parts)))
    return LengthDistribution(bounds, np.array(parts) / sum(parts), limit)


@given(parts=shares, limit=st.integers(1, 700), price=prices)
def test_no_other_room_is_worth_more(parts: list[float], limit: int, price: float) -> None:
    """At the corners of the distribution, which its best rooms are."""
    thought = a_distribution(parts, limit)

    def worth(room: float) -> float:
        return (thought.share_within(room) if room < limit else 1.0) - price * room

    rooms = [*(float(bound) for bound in thought.bounds if bound < limit), float(limit)]
    room = thought.room(price)
    assert 0 <= room <= limit
    assert worth(room) >= max(map(worth, rooms)) - 1e-9 or room == 0


@given(parts=shares, limit=st.integers(1, 700), pair=st.tuples(prices, prices))
def test_the_dearer_the_less_room(parts: list[float], limit: int, pair: tuple[float, float]) -> None:
    thought = a_distribution(parts, limit)

    assert thought.room(max(pair)) <= thought.room(min(pair))
    assert thought.room(0.0) == limit


@given(parts=shares, limit=st.integers(1, 700), length=st.integers(1, 900), price=prices)
def test_an_answers_price_is_where_its_room_ends(
    parts: list[float], limit: int, length: int, price: float
) -> None:
    thought = a_distribution(parts, limit)
    dearest = thought.price_of(length)

    assert (thought.room(price) >= min(length, limit)) == (price < dearest) or price == dearest


@given(parts=shares, limit=st.integers(1, 700))
def test_uncertainty_and_mean_have_their_ranges(parts: list[float], limit: int) -> None:
    thought = a_distribution(parts, limit)

    assert 0 <= thought.uncertainty <= 1
    assert 1 <= thought.mean <= min(max(1, limit), 2 * thought.bounds[-1])
    assert a_distribution([1.0] * len(parts), 10_000).uncertainty == pytest.approx(1)
    assert LengthDistribution(np.array([5.0]), np.array([1.0, 0.0]), 9).uncertainty == 0


def test_a_price_holds_the_share_of_answers_to_come() -> None:
    """Over many draws, of exchangeable answers at least the wanted share can pay it."""
    rng = np.random.default_rng(0)
    for hold in (0.5, 0.9, 0.99):
        held = []
        for _ in range(400):
            earlier, coming = np.sort(rng.gamma(1.0, size=150)), rng.gamma(1.0, size=150)
            held.append((coming > price_holding(earlier.tolist(), hold)).mean())
        assert np.mean(held) == pytest.approx(hold, abs=0.01)
        assert np.mean(held) >= hold - 0.003


def test_a_price_that_nobody_knows_is_nothing() -> None:
    assert price_holding([], 0.9) == 0
    assert price_holding([0.1] * 50, 0.99) == 0  # 50 answers say nothing of one in a hundred


def test_answers_that_outgrow_their_room_make_room_for_others() -> None:
    """And answers that stay within it take it back: in both directions, without training anew."""
    running = RunningPrice([0.01] * 500, hold=0.9, window=100)
    start = running.price

    for _ in range(100):
        running.observe(0.001)
    dearest_of_long = running.price
    for _ in range(100):
        running.observe(0.5)

    assert dearest_of_long < start < running.price


def test_a_running_price_forgets_what_left_its_window() -> None:
    running, other = RunningPrice([], 0.9, window=40), RunningPrice([], 0.9, window=40)
    for step in range(100):
        running.observe(step / 7)
    for step in range(60, 100):
        other.observe(step / 7)

    assert running.price == other.price


def test_means_follow_what_answers_become_and_stay_bounded() -> None:
    ratio = RunningRatio(window=100)
    assert ratio.ratio == 1

    for _ in range(200):
        ratio.observe(100.0, 150)
    assert ratio.ratio == pytest.approx(1.5)

    for _ in range(200):
        ratio.observe(100.0, 9000)
    assert ratio.ratio == 4
