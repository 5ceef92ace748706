"""Tuning begins with the rows whose defaults break a law; rounds on machines whose truth is known."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.rounds import Times, against_best, halved, ratio, shuffled_rounds, standing
from benchmarks.row_laws import Roof, told, worst_of_laws
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.tuner.task_division import breaking
from tests.support.machines.synthetic_machine import (
    MS,
    OTHER,
    PLAIN,
    Cost,
    SyntheticMachine,
    default_of,
    in_use,
    plain_cost,
    run_on,
    task_of,
)
from tests.support.tiers import examples


def with_defaults(times: dict[int, int]) -> Cost:
    """The plain cost, but these for default schedules, by rows."""

    def cost(problem: Problem, schedule: Schedule) -> int:
        is_default = replace(schedule, compute_path=PLAIN.compute_path) == default_of(problem.m)
        return times[problem.m] if is_default else plain_cost(problem, schedule)

    return cost


CLIFF = with_defaults({1: 150_000, 2: 160_000, 4: 600_000, 8: 300_000})


def searched(machine: SyntheticMachine) -> list[int]:
    """Numbers of rows in the order in which other schedules than the default were first timed for them."""
    return list(
        dict.fromkeys(problem.m for problem, schedule in machine.timed if schedule != default_of(problem.m))
    )


@examples(30)
@given(st.lists(st.integers(200_000, 5_000_000), min_size=len(MS), max_size=len(MS)))
def test_what_breaks_a_law_is_searched_and_settled_first(costs: list[int]) -> None:
    times = dict(zip(MS, costs, strict=True))
    machine = SyntheticMachine(with_defaults(times))
    outcome = run_on(machine, ":memory:", [task_of()])
    first = list(breaking(times))

    assert outcome.end == "complete"
    assert searched(machine)[: len(first)] == first
    assert [problem.m for problem, *_ in machine.duels][: len(first)] == first
    assert [gain.problem.m for gain in outcome.gains] == list(MS)


@pytest.mark.many
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_budget_that_is_cut_short_goes_to_the_cliff(tmp_path: Path, share: float) -> None:
    """And nothing that was timed is timed again."""
    tasks = [task_of(n) for n in (256, 384)]
    whole = SyntheticMachine(CLIFF)
    expected = run_on(whole, ":memory:", tasks)
    machine, database = SyntheticMachine(CLIFF), str(tmp_path / "cut.db")
    first = run_on(machine, database, tasks, budget_s=share * whole.now_s)
    second = run_on(SyntheticMachine(CLIFF), database, tasks)

    assert (first.end, second.end) == ("budget", "complete")
    assert machine.duels[0][0].m == 4
    assert second.replayed >= first.timed
    assert in_use(second) == in_use(expected)
    assert run_on(SyntheticMachine(CLIFF), database, tasks).timed == 0


def test_a_weight_that_took_another_arithmetic_has_no_cliffs_of_its_default(tmp_path: Path) -> None:
    def cost(problem: Problem, schedule: Schedule) -> int:
        return CLIFF(problem, schedule) // (4 if schedule.compute_path == OTHER.compute_path else 1)

    tasks, database = [task_of(arithmetics=(PLAIN, OTHER))], str(tmp_path / "tuned.db")
    outcome = run_on(SyntheticMachine(cost), database, tasks)
    again = SyntheticMachine(cost)
    second = run_on(again, database, tasks)

    assert {gain.schedule.compute_path for gain in outcome.gains} == {OTHER.compute_path}
    assert again.timed == again.duels == []
    assert in_use(second) == in_use(outcome)


@given(fixed=st.floats(0.1, 100), each=st.floats(0.1, 100), most=st.integers(2, 64))
def test_times_that_grow_evenly_keep_both_laws(fixed: float, each: float, most: int) -> None:
    times = {m: fixed + each * m for m in range(1, most + 1)}

    assert all(worst.ratio < 1 for worst in worst_of_laws(times))


@given(st.dictionaries(st.integers(1, 64), st.floats(1, 1000), min_size=3))
def test_the_worst_of_each_law_is_the_worst_that_there_is(times: dict[int, float]) -> None:
    less, two = worst_of_laws(times)

    assert less.ratio == max(times[m] / times[more] for m in times for more in times if m < more)
    assert two.ratio == max(
        (times[a + b] / (times[a] + times[b]) for a in times for b in times if a + b in times), default=0.0
    )


@given(st.dictionaries(st.integers(1, 64), st.floats(1, 1000), min_size=1), st.floats(0, 1))
def test_rows_that_break_a_law_are_those_that_are_dearer_by_more_than_allowed(
    times: dict[int, float], allowance: float
) -> None:
    beside_more = {m for m in times for more in times if more > m and times[m] / times[more] > 1 + allowance}
    sums = {(a + b, times[a] + times[b]) for a in times for b in times if a + b in times}
    beside_two = {m for m, both in sums if times[m] / both > 1 + allowance}

    assert breaking(times, allowance) == tuple(sorted(beside_more | beside_two))


def test_a_cliff_is_named() -> None:
    times = {4: 179.0, 6: 774.0, 8: 812.0, 2: 170.0, 12: 591.0}

    assert list(map(told, worst_of_laws(times))) == ["1.37 (8 against 12)", "2.27 (8 against 4 + 4)"]


def test_the_roof_is_the_longer_of_reading_and_multiplying() -> None:
    roof = Roof(weight_bytes=1000, ops_a_row=100, read_bytes_per_s=1e9, peak_ops_per_s=1e9)

    assert [roof.ns(m) for m in (1, 10, 20)] == pytest.approx([1000, 1000, 2000])
    assert told(roof.worst({1: 1100.0, 20: 3000.0})) == "1.50 (20)"


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
