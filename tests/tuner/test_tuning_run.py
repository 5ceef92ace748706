"""Tuning runs: whatever interrupts them, they end the same; nothing slower comes into use; budgets hold."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import pytest

from phasewise.kerneldb.records import Problem, Sample, Schedule
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.search.space import Arithmetic
from phasewise.tuner.tuning_run import INTERLEAVED, Duel, TuningOutcome
from tests.support.machines import synthetic_machine
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket
from tests.support.machines.synthetic_machine import (
    MACHINE,
    MS,
    OTHER,
    PLAIN,
    SCOPE,
    SyntheticMachine,
    default_of,
    in_use,
    plain_cost,
    run_on,
    task_of,
)
from tests.support.tiers import first_is_smoke

SCRIPT = [sys.executable, synthetic_machine.__file__]


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "tuned.db")


@cache
def undisturbed() -> tuple[SyntheticMachine, TuningOutcome]:
    """A run that nobody interrupts or shares, and what it ran on."""
    machine = SyntheticMachine()
    return machine, run_on(machine, ":memory:")


def test_everything_is_timed_once_settled_once_and_kept(database: str) -> None:
    machine = SyntheticMachine()
    first = run_on(machine, database)
    again = SyntheticMachine()
    second = run_on(again, database)

    assert first.end == second.end == "complete"
    assert first.timed == len(machine.timed) > 0
    assert again.timed == again.duels == []
    assert second.replayed == first.timed + first.replayed
    assert in_use(second) == in_use(first)


def test_what_is_in_use_was_proven_faster_than_the_default(database: str) -> None:
    outcome = run_on(SyntheticMachine(), database)

    assert [gain.problem.m for gain in outcome.gains] == [*MS, *MS]
    for gain in outcome.gains:
        assert gain.tuned_ns == plain_cost(gain.problem, gain.schedule) <= gain.default_ns
        assert gain.is_default or gain.comparison.gain_low > 1


def test_where_the_default_is_best_the_verdict_says_so(database: str) -> None:
    def cost(problem: Problem, schedule: Schedule) -> int:
        return 1000 if schedule == default_of(problem.m) else 2000

    outcome = run_on(SyntheticMachine(cost), database)

    assert all(gain.is_default and gain.tuned_ns == gain.default_ns for gain in outcome.gains)
    assert len(outcome.gains) == outcome.products
    assert run_on(SyntheticMachine(cost), database).duels == 0


class Killed(BaseException):
    """As sudden as kill -9 can be within a process."""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "way"), first_is_smoke(product(range(3), (Killed, KeyboardInterrupt))))
def test_interrupted_ten_times_it_ends_as_if_undisturbed(
    tmp_path: Path, seed: int, way: type[BaseException]
) -> None:
    alone, expected = undisturbed()
    database, dice = str(tmp_path / "disturbed.db"), Random(seed)
    timed = 0
    for _ in range(10):
        fuse = iter(range(dice.randrange(1, 25)))

        def burn(fuse: object = fuse) -> None:
            if next(fuse, None) is None:  # type: ignore[call-overload]
                raise way

        machine = SyntheticMachine(happens=burn)
        with suppress(Killed):
            assert run_on(machine, database).end in ("interrupted", "complete")
        timed += len(machine.timed)
    last = SyntheticMachine()
    outcome = run_on(last, database)

    assert outcome.end == "complete"
    assert in_use(outcome) == in_use(expected)
    assert timed + len(last.timed) <= len(alone.timed) + 10 * INTERLEAVED


@pytest.mark.slow
def test_killed_by_the_system_ten_times_it_ends_as_if_undisturbed(tmp_path: Path) -> None:
    _, expected = undisturbed()
    database, dice = str(tmp_path / "killed.db"), Random(5)
    for _ in range(10):
        process = subprocess.Popen([*SCRIPT, database, "0.02"], stdout=subprocess.DEVNULL)
        time.sleep(dice.uniform(0.3, 1.2))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    last = subprocess.run([*SCRIPT, database], capture_output=True, text=True, check=True, timeout=60)

    told = json.loads(last.stdout)
    assert told["end"] == "complete"
    assert [tuple(row) for row in told["in_use"]] == in_use(expected)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def shared_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that several processes may use; the server lives as long as the test."""
    if request.param == "sqlite":
        yield str(tmp_path / "shared.db")
    else:
        with postgres_socket() as socket:
            yield new_database_url(socket)


@pytest.mark.slow
def test_two_processes_share_one_database_and_the_work(shared_database: str) -> None:
    alone, expected = undisturbed()
    command = [*SCRIPT, shared_database, "0.01"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outcomes = [json.loads(process.communicate(timeout=120)[0]) for process in both]

    for outcome in outcomes:
        assert outcome["end"] == "complete"
        assert [tuple(row) for row in outcome["in_use"]] == in_use(expected)
    assert sum(outcome["timed"] for outcome in outcomes) < 2 * len(alone.timed)


def test_a_weight_has_a_share_of_the_budget_as_large_as_its_work(database: str) -> None:
    """None is cut although there is time for it: no rows are searched after those of the next weight."""
    tasks = [task_of(8192), task_of(64), task_of(128)]
    whole = SyntheticMachine()
    run_on(whole, str(Path(database).with_name("whole.db")), tasks)
    machine = SyntheticMachine()
    run_on(machine, database, tasks, 1.3 * whole.now_s, call_s=lambda problem: problem.n / 1e3)

    sizes = [problem.n for problem, _ in machine.timed]
    assert sizes == sorted(sizes, key=[8192, 64, 128].index)


class StopWatch(SyntheticMachine):
    """Notes when each measurement begins."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_s: list[float] = []

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        self.begun_s.append(self.now_s)
        return super().measure(problem, schedules)

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        self.begun_s.append(self.now_s)
        return super().duel(problem, incumbent, candidate)


@pytest.mark.many
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.7])
def test_a_run_ends_with_its_budget_and_what_had_begun(tmp_path: Path, share: float) -> None:
    """That is one batch of timings, or one duel: nothing begins once the budget is over."""
    tasks = [task_of(n) for n in (256, 384, 512)]
    whole = StopWatch()
    run_on(whole, str(tmp_path / "whole.db"), tasks)
    machine, budget_s = StopWatch(), share * whole.now_s
    outcome = run_on(machine, str(tmp_path / "cut.db"), tasks, budget_s=budget_s)

    assert outcome.end == "budget"
    assert all(begun_s < budget_s for begun_s in machine.begun_s)
    assert machine.begun_s


@pytest.mark.slow
@pytest.mark.parametrize("share", first_is_smoke([0.2, 0.5, 0.8]))
def test_what_a_budget_cut_short_is_not_timed_again(database: str, share: float) -> None:
    """Weights that were begun before a cut one was complete ask on as they began, without its seeds.

    So every timing of the first run answers a question of the second.
    """
    tasks = [task_of(n) for n in (256, 384, 512, 640)]
    whole = SyntheticMachine()
    run_on(whole, str(Path(database).with_name("whole.db")), tasks)
    first = run_on(SyntheticMachine(), database, tasks, budget_s=share * whole.now_s)
    second = run_on(SyntheticMachine(), database, tasks)

    assert (first.end, second.end) == ("budget", "complete")
    assert second.replayed >= first.timed > 0
    assert run_on(SyntheticMachine(), database, tasks).timed == 0


def test_without_resuming_all_is_timed_again(database: str) -> None:
    first = run_on(SyntheticMachine(), database)
    later_ms = time.time_ns() // 1_000_000 + 1
    again = run_on(SyntheticMachine(), database, since_ms=later_ms - 1)

    assert again.timed >= first.timed / 2
    assert in_use(again) == in_use(first)


def with_other(share: float) -> synthetic_machine.Cost:
    def cost(problem: Problem, schedule: Schedule) -> int:
        plain = plain_cost(problem, schedule)
        return round(plain * (share if schedule.compute_path == OTHER.compute_path else 1.0))

    return cost


def in_both_phases(answers: float, prompts: float) -> synthetic_machine.Cost:
    """OTHER's speed, as a share of PLAIN's: of one row, of the most rows; the others as fast."""

    def cost(problem: Problem, schedule: Schedule) -> int:
        speed = {min(MS): answers, max(MS): prompts}.get(problem.m, 1.0)
        plain = plain_cost(problem, schedule)
        return round(plain / speed if schedule.compute_path == OTHER.compute_path else plain)

    return cost


@pytest.mark.parametrize(
    ("cost", "winner"),
    [
        (with_other(0.5), OTHER),
        (with_other(0.99), PLAIN),  # a per cent is not worth other bits
        (with_other(2.0), PLAIN),
        (in_both_phases(0.975, 1.8), OTHER),
        (in_both_phases(1.0, 1.8), OTHER),
        (in_both_phases(0.9, 4.0), PLAIN),  # it must not slow answers
        (in_both_phases(0.25, 4.0), PLAIN),
    ],
)
def test_all_rows_of_a_weight_use_one_arithmetic(
    database: str, cost: synthetic_machine.Cost, winner: Arithmetic
) -> None:
    """The other one if it gains over all rows together."""
    tasks = [task_of(arithmetics=(PLAIN, OTHER))]
    outcome = run_on(SyntheticMachine(cost), database, tasks)

    assert {gain.schedule.compute_path for gain in outcome.gains} == {winner.compute_path}
    assert [gain.problem.m for gain in outcome.gains] == list(MS)
    assert run_on(SyntheticMachine(cost), database, tasks).duels == 0


def test_rows_tuned_later_follow_the_arithmetic_of_the_weight(database: str) -> None:
    arithmetics = (PLAIN, OTHER)
    run_on(SyntheticMachine(with_other(0.5)), database, [task_of(ms=(1, 2), arithmetics=arithmetics)])
    outcome = run_on(SyntheticMachine(with_other(0.5)), database, [task_of(arithmetics=arithmetics)])

    assert [gain.problem.m for gain in outcome.gains] == list(MS)
    assert {gain.schedule.compute_path for gain in outcome.gains} == {OTHER.compute_path}


def test_another_arithmetic_that_only_seemed_faster_is_not_taken(database: str) -> None:
    """The samples of a search lied; the duels say otherwise, and the old arithmetic is tuned instead."""

    class Liar(SyntheticMachine):
        def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> synthetic_machine.Duel:
            self.cost = with_other(20)
            try:
                return super().duel(problem, incumbent, candidate)
            finally:
                self.cost = with_other(0.5)

    tasks = [task_of(arithmetics=(PLAIN, OTHER))]
    machine = Liar(with_other(0.5))
    outcome = run_on(machine, database, tasks)

    assert {gain.schedule.compute_path for gain in outcome.gains} == {PLAIN.compute_path}


def test_rows_of_another_build_or_machine_are_not_used(database: str) -> None:
    first = run_on(SyntheticMachine(), database)
    for other in ({"kernel_abi": "gemm-portable-2"}, {"machine": replace(MACHINE, core_sig="other")}):
        machine = SyntheticMachine()
        run_on(machine, database, scope=replace(SCOPE, **other))  # type: ignore[arg-type]
        assert len(machine.timed) == first.timed


class Watched(SyntheticMachine):
    """And which schedules it was told of while others may be at work."""

    def __init__(self) -> None:
        super().__init__()
        self.is_alone = False
        self.prepared: set[tuple[Problem, Schedule]] = set()

    @contextmanager
    def turn(self, seconds: float = math.inf) -> Iterator[bool]:
        self.is_alone = True
        yield True
        self.is_alone = False

    def prepare(self, problem: Problem, schedules: Sequence[Schedule]) -> None:
        assert not self.is_alone
        self.prepared |= {(problem, schedule) for schedule in schedules}


def test_all_is_prepared_before_a_turn(database: str) -> None:
    machine, lock = Watched(), MeasurementLock()
    lock.turn = machine.turn  # type: ignore[method-assign]
    run_on(machine, database, lock=lock)

    fought = {(problem, schedule) for problem, *both in machine.duels for schedule in both}
    assert machine.prepared == {*machine.timed, *fought}


class NeverAlone(MeasurementLock):
    def turn(self, seconds: float = math.inf) -> AbstractContextManager[bool]:
        return nullcontext(False)


def test_without_a_turn_nothing_is_timed(database: str) -> None:
    machine = SyntheticMachine()
    outcome = run_on(machine, database, [task_of()], 60, lock=NeverAlone())

    assert (outcome.end, outcome.timed, machine.timed) == ("budget", 0, [])
