"""Tuning runs begin each weight with the rows whose default schedules break a law of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
