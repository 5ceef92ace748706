"""Schedules that won elsewhere: fought again here first, never used unseen, and gone when they lose."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phasewise.kerneldb.hints import Hints, HintTrust, counts_told, waiting_hints
from phasewise.kerneldb.portable import import_rows, rows_of
from phasewise.kerneldb.product_counts import count_products
from phasewise.kerneldb.records import Measurement, Problem, Schedule
from phasewise.kerneldb.schema import VERSION_TABLE
from phasewise.kerneldb.store import open_store
from phasewise.tuner.doctor.host import TunedCounts
from phasewise.tuner.doctor.software import set_aside
from phasewise.tuner.first_duels import FIRST_S, in_order_of_worth
from phasewise.tuner.ledger import Ledger
from phasewise.tuner.tuning_run import HintsOutcome, Tools, settle_hints, tune
from tests.support.machines.synthetic_machine import (
    MACHINE,
    MS,
    OPTIONS,
    OTHER,
    PLAIN,
    SCOPE,
    SyntheticMachine,
    default_of,
    plain_cost,
    task_of,
)

NEW = replace(SCOPE, kernel_abi="gemm-portable-2", program_version="0.2.0")
"""The same machine under the next release."""
TASKS = (task_of(), task_of(512))


def tuned(database: str, scope: object = SCOPE) -> dict[Problem, Schedule]:
    """A finished run of one build, and what it has in use."""
    machine = SyntheticMachine()
    with open_store(database) as store:
        ledger = Ledger(store, scope)  # type: ignore[arg-type]
        outcome = tune(TASKS, Tools(machine, ledger, OPTIONS, clock=machine.clock), 1e9)
    return {gain.problem: gain.schedule for gain in outcome.gains}


def hints_of(database: str, shipped: Iterable[Measurement] = (), kernel_abi: str = NEW.kernel_abi) -> Hints:
    with open_store(database) as store:
        return waiting_hints(store, MACHINE, kernel_abi, shipped)


def fought(
    database: str, machine: SyntheticMachine, budget_s: float = FIRST_S, scope: Any = NEW
) -> HintsOutcome:
    with open_store(database) as store:
        hints = waiting_hints(store, MACHINE, scope.kernel_abi)
        hinted = in_order_of_worth(TASKS, hints, lambda *_: None, lambda problem: problem.n * problem.m)
        tools = Tools(machine, Ledger(store, scope), OPTIONS, clock=machine.clock)
        return settle_hints(hinted, tools, budget_s)


def in_use(database: str, kernel_abi: str = NEW.kernel_abi) -> dict[Problem, Schedule]:
    with open_store(database) as store:
        rows = store.promoted_measurements(MACHINE)
    return {row.problem: row.sample.schedule for row in rows if row.kernel_abi == kernel_abi}


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "tuned.db")


def rows(database: str) -> list[object]:
    with open_store(database) as store:
        return [*rows_of(store)]


def test_after_an_upgrade_the_old_winners_are_in_use_again_within_a_minute(database: str) -> None:
    """Nothing is lost, none was used before it was timed, and the search is not needed for it."""
    old = {
        problem: schedule
        for problem, schedule in tuned(database).items()
        if schedule != default_of(problem.m)
    }
    before = rows(database)
    hints = hints_of(database)
    assert {problem: hint.schedule for problem, hint in hints.items()} == tuned(database)
    assert {hint.trust for hint in hints.values()} == {HintTrust.OTHER_BUILD}
    assert in_use(database) == {}

    machine = SyntheticMachine()
    outcome = fought(database, machine)

    assert in_use(database) == old
    assert (outcome.timed, outcome.promoted) == (len(old), len(old))
    assert outcome.elapsed_s < FIRST_S
    assert {schedule for _, schedule in machine.timed} <= {*old.values(), *map(default_of, MS)}
    assert [row for row in rows(database) if row in before] == before
    again = SyntheticMachine()
    assert fought(database, again).asked == 0
    assert again.timed == []


def test_a_database_of_the_release_before_loses_nothing_and_its_winners_are_told_and_used_again(
    database: str,
) -> None:
    """Its schema, its kernels: what it had is all there, doctor says what waits, and a minute suffices."""
    old = {
        problem: schedule
        for problem, schedule in tuned(database).items()
        if schedule != default_of(problem.m)
    }
    before = rows(database)
    as_the_release_before_kept_it(database)

    said = list[str]()
    with open_store(database, said.append) as store:
        counts = count_products(store, MACHINE.core_sig, {NEW.kernel_abi})
    assert "upgraded from schema 0006" in said[0]
    assert rows(database) == before
    assert (counts.tuned, counts.set_aside) == (0, len(tuned(database)))
    host = SimpleNamespace(tuned=TunedCounts(database, 1, len(before), counts))
    (told,) = set_aside(host)  # type: ignore[arg-type]
    assert str(counts.set_aside) in told.title

    assert fought(database, SyntheticMachine()).elapsed_s < FIRST_S
    assert in_use(database) == old
    assert [row for row in rows(database) if row in before] == before


def as_the_release_before_kept_it(database: str) -> None:
    """The file as schema 0006 has it: 0007 adds a table."""
    with contextlib.closing(sqlite3.connect(database)) as file:
        file.execute("DROP TABLE predictor_score")
        file.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0006'")
        file.commit()


def test_a_hint_that_lost_its_speed_is_timed_once_and_never_used(database: str) -> None:
    """The new build runs the default fastest."""
    tuned(database)

    def cost(problem: Problem, schedule: Schedule) -> int:
        return 1000 if schedule == default_of(problem.m) else 5000

    machine = SyntheticMachine(cost)
    outcome = fought(database, machine)

    assert outcome.promoted == 0
    assert machine.duels == [], "hopeless ones are not even compared in pairs"
    assert in_use(database) == {}
    assert hints_of(database).keys() <= set(tuned(database))
    assert fought(database, SyntheticMachine(cost)).asked == 0


@pytest.mark.many
@pytest.mark.parametrize("lie", [1, 10, 1000])
def test_lies_cost_the_stated_time_and_leave_nothing_slower(tmp_path: Path, lie: int) -> None:
    """Timings of a stranger, too good by any factor: what is in use is never slower than it was."""
    source, here = str(tmp_path / "source.db"), str(tmp_path / "here.db")
    tuned(source)
    slow = Schedule(8, 1, 8, 4096, 8192, 2, 1, 1, PLAIN.compute_path, PLAIN.k_parts, 0, "mn")
    with open_store(source) as store:
        theirs = [*rows_of(store)]
    lies = []
    for row in theirs:
        if isinstance(row, Measurement):
            fast = max(1, row.sample.estimate_ns // lie)
            sample = replace(row.sample, schedule=slow, samples_ns=(fast,), estimate_ns=fast)
            lies.append(replace(row, sample=sample))
        elif hasattr(row, "comparison") and hasattr(row, "incumbent"):
            lies.append(replace(row, schedule=slow))
    with open_store(here) as store:
        import_rows(store, lies)
    budget_s, machine = 0.05, SyntheticMachine()
    most_s = max(
        5 * plain_cost(hint.problem, slow) / 1e9
        for hint in hints_of(here, kernel_abi=SCOPE.kernel_abi).values()
    )
    outcome = fought(here, machine, budget_s, SCOPE)

    assert outcome.asked > 0
    assert outcome.elapsed_s <= budget_s + 4 * most_s, "what has begun is ended"
    for problem, schedule in in_use(here, SCOPE.kernel_abi).items():
        assert plain_cost(problem, schedule) <= plain_cost(problem, default_of(problem.m))


@pytest.mark.slow
def test_the_most_trusted_hint_of_a_product_is_the_one(database: str, tmp_path: Path) -> None:
    """Own ones of another build, then imported ones, then those of the package."""
    other = str(tmp_path / "other.db")
    tuned(other)
    with open_store(other) as store:
        theirs = [*rows_of(store)]
        shipped = store.promoted_measurements(MACHINE)
    of_package = hints_of(database, shipped)
    assert {hint.trust for hint in of_package.values()} == {HintTrust.SHIPPED}
    assert counts_told(of_package.values()) == f"{len(shipped)} of the package"
    with open_store(database) as store:
        import_rows(store, theirs)
    assert {hint.trust for hint in hints_of(database, shipped).values()} == {HintTrust.IMPORTED}
    tuned(database)
    assert {hint.trust for hint in hints_of(database, shipped).values()} == {HintTrust.OTHER_BUILD}


@pytest.mark.parametrize("kernel_abi", ["gemm-avx2-2", "attention-portable-2"])
def test_other_kernels_give_no_hint(database: str, kernel_abi: str) -> None:
    """Another instruction set, another family."""
    tuned(database)

    with open_store(database) as store:
        assert waiting_hints(store, MACHINE, kernel_abi) == {}


def test_a_weight_with_verdicts_keeps_its_arithmetic(database: str) -> None:
    """A hint of another arithmetic knows only a part of it."""
    both = (task_of(arithmetics=(PLAIN, OTHER)),)
    old = tuned(database)
    changed = {
        problem: replace(schedule, compute_path=OTHER.compute_path)
        for problem, schedule in old.items()
        if problem in both[0].problems
    }
    with open_store(database) as store:
        measured = [
            measurement
            for measurement in store.promoted_measurements(MACHINE)
            if measurement.problem in changed
        ]
        shipped = [
            replace(
                measurement,
                sample=replace(measurement.sample, schedule=changed[measurement.problem]),
            )
            for measurement in measured
            if measurement.problem.m != MS[-1]
        ]
        ledger = Ledger(store, SCOPE)
        hints = {
            measurement.problem: next(
                iter(waiting_hints(store, MACHINE, "gemm-portable-9", [measurement]).values())
            )
            for measurement in shipped
        }
        hints = {
            problem: replace(hint, measurement=measurement)
            for (problem, hint), measurement in zip(hints.items(), shipped, strict=True)
        }
        hinted = in_order_of_worth(both, hints, lambda *_: None, lambda problem: problem.m)
        machine = SyntheticMachine(lambda problem, schedule: 1)
        settle_hints(hinted, Tools(machine, ledger, OPTIONS, clock=machine.clock), FIRST_S)

    assert [len(task.schedules) for task in hinted] == [len(MS) - 1]
    assert machine.timed == []
