"""Rounds on made-up machines whose truth is known: flips of pace, one-sided noise, spikes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.rounds import Times, against_best, halved, ratio, shuffled_rounds, standing
from tests.support.tiers import examples

ROUNDS = 150
MACHINES = 60


def times_of(true: Sequence[float], rounds: int, dice: np.random.Generator, noise: float = 0.06) -> Times:
    """Each round at one of two paces; every turn up to a few per cent late, one in ten by much more."""
    shape = (rounds, len(true))
    pace = dice.choice((1.0, 1.6), (rounds, 1))
    late = np.exp(noise * np.abs(dice.standard_normal(shape)))
    spikes = np.where(dice.random(shape) < 0.1, dice.uniform(1.2, 4.0, shape), 1.0)
    times: Times = 1e5 * np.asarray(true) * pace * late * spikes
    return times


@pytest.mark.parametrize(
    "true",
    [
        [1.0] * 12,
        [1.03, *[1.0] * 11],
        [1.03, 1.0, *[1.05] * 10],
        [1.0, *(1.01 + 0.002 * i for i in range(11))],
    ],
    ids=["all alike", "one behind eleven", "one best", "first is best"],
)
def test_what_is_said_about_the_best_is_unbiased_and_its_interval_holds_the_truth(true: list[float]) -> None:
    dice = np.random.default_rng(1)
    estimates = [against_best(times_of(true, ROUNDS, dice), 0, range(len(true)), i) for i in range(MACHINES)]

    truth = true[0] / min(true)
    assert statistics.fmean(estimate.middle for estimate in estimates) == pytest.approx(truth, abs=0.002)
    assert max(abs(estimate.middle - truth) for estimate in estimates) < 0.03
    assert sum(estimate.low <= truth <= estimate.high for estimate in estimates) >= 0.85 * MACHINES


def test_the_least_median_of_many_is_lucky_and_the_judge_is_not() -> None:
    """Twelve that are equal: the rounds that choose call the first one slower, the others do not."""
    dice = np.random.default_rng(2)
    times = [times_of([1.0] * 12, 30, dice) for _ in range(MACHINES)]

    naive = statistics.fmean(standing(time)[0] / standing(time).min() for time in times)
    judged = statistics.fmean(against_best(time, 0, range(12)).middle for time in times)

    assert naive > 1.005
    assert abs(judged - 1) < 0.004


@examples(30)
@given(st.integers(0, 1000), st.floats(0.5, 20))
def test_the_pace_of_a_round_cancels(seed: int, factor: float) -> None:
    dice = np.random.default_rng(seed)
    times = times_of([1.0, 1.1, 0.9], 20, dice)
    paced = times * dice.uniform(0.1, factor, (20, 1))

    np.testing.assert_allclose(standing(paced) / standing(paced)[0], standing(times) / standing(times)[0])
    assert ratio(paced, 1, 0).middle == pytest.approx(ratio(times, 1, 0).middle)


def test_halving_keeps_one_of_the_best_of_many() -> None:
    """128 lie within 13 % of each other; one within a per cent of the best comes first."""
    dice = np.random.default_rng(3)
    true = [1.0 + 0.001 * i for i in range(128)]

    def race(running: Sequence[int], rounds: int) -> npt.NDArray[np.float64]:
        return times_of([true[index] for index in running], rounds, dice)

    for _ in range(10):
        order = [int(index) for index in dice.permutation(128)]
        kept = halved(order, race, 8)
        assert len(set(kept)) == 8
        assert min(true[index] for index in kept) <= 1.01


@examples(30)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 100))
def test_everyone_takes_one_turn_a_round_whatever_the_order(count: int, rounds: int, seed: int) -> None:
    turns: list[int] = []

    def take(number: int) -> tuple[int, ...]:
        turns.append(number)
        return (100 + number,)

    times = shuffled_rounds([lambda number=number: take(number) for number in range(count)], rounds, seed)  # type: ignore[misc]

    assert (times == 100 + np.arange(count)).all()
    for index in range(rounds):
        assert sorted(turns[index * count : (index + 1) * count]) == list(range(count))
