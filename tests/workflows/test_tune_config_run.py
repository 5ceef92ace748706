"""Time that one phase leaves of a run goes to another whose plan was not compared, and to no other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from phasewise.kerneldb.records import Comparison, PlanRecord
from phasewise.kerneldb.store import Store, open_store
from phasewise.tuner.config.simulate import Objective
from phasewise.tuner.config.steps import ModelShape
from phasewise.tuner.config.study import SearchOutcome
from phasewise.tuner.config.trace import RequestLengths
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import Phase, RankCores, ServicePlan, machine_key
from phasewise.tuner.topotree import Configuration, OperatorLimits
from phasewise.workflows.tune_config.run import Run, judge, judge_again
from phasewise.workflows.tune_config.settings import Show, TuneConfigSettings
from phasewise.workflows.tune_config.subject import Searched, Subject
from tests.support.machines.paper_machines import xeon

BUDGET_S = 60.0
LIMITS = OperatorLimits(32, 32, 128, 11008)
SHAPE = ModelShape("toy", 1, 64, 32, 32, 2, 128, 256, 1000, 100)


@dataclass
class CountingJury:
    """A plan costs as much as it has cores; a comparison has a result only if there is time for one."""

    has_time: bool
    deadlines_s: list[float] = field(default_factory=list)
    is_timed: bool = True

    def cost_ms(self, plan: ServicePlan) -> float:
        return float(len(plan.cores))

    def compare(self, reference: ServicePlan, plan: ServicePlan, deadline_s: float) -> Comparison | None:
        self.deadlines_s.append(deadline_s)
        return Comparison(1.5, 1.25, 2.0, 0.95, 40) if self.has_time else None


class QuietShow(Show):
    """Shows nothing: nothing is searched or tuned here."""

    def searching(self, phase: Phase) -> NoReturn:
        raise AssertionError("the search is over")

    def tuning(self, progress: object) -> NoReturn:
        raise AssertionError("kernels are tuned already")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "tuning.db") as store:
        yield store


def a_run(began_s: float) -> Run:
    """A measured run for prefill alone, after its search."""
    machine = xeon()
    subject = Subject(
        machine=machine,
        key=machine_key(machine),
        shape=SHAPE,
        model_key="toy@f32",
        limits=LIMITS,
        ranks=None,
        trace=(RequestLengths(8, 8),),
        objective=Objective("e2e"),
    )
    wish = TuneConfigSettings(model="toy", weight_format="f32", phase="prefill", budget_s=BUDGET_S)
    return Run(wish, subject, show=QuietShow(), started_s=began_s, lock=MeasurementLock())


def searched() -> Searched:
    """A search whose one plan, two cores, is none of the references."""
    best = Configuration((RankCores((0, 1), 0),))
    outcome = SearchOutcome("complete", (best, 1.0), ((best, 1.0),), 1, 1, 1, 0, 0, 0, "study", 0, 0)
    return Searched("prefill", outcome, 1.0, {})


def n_stored(store: Store) -> int:
    return len(store.rows(PlanRecord))


def test_a_phase_that_was_not_compared_gets_what_is_left(store: Store) -> None:
    run, search = a_run(time.monotonic()), searched()
    judge(run, search, CountingJury(has_time=False), run.deadline_s())
    assert not run.verdicts["prefill"].is_settled

    jury = CountingJury(has_time=True)
    judge_again(run, search, jury, store)
    assert run.verdicts["prefill"].is_settled
    assert max(jury.deadlines_s) == pytest.approx(run.deadline_s(), abs=1e-6)
    assert n_stored(store) == 1

    n_compared = len(jury.deadlines_s)
    judge_again(run, search, jury, store)
    assert (len(jury.deadlines_s), n_stored(store)) == (n_compared, 1)  # settled: nothing is compared again


def test_a_phase_without_time_left_is_not_compared_again(store: Store) -> None:
    run, search = a_run(time.monotonic()), searched()
    judge(run, search, CountingJury(has_time=False), run.deadline_s())
    run.started_s -= 2 * BUDGET_S

    jury = CountingJury(has_time=True)
    judge_again(run, search, jury, store)

    assert (jury.deadlines_s, n_stored(store)) == ([], 0)


def test_a_phase_of_which_nothing_could_run_is_not_judged_again(store: Store) -> None:
    run, jury = a_run(time.monotonic()), CountingJury(has_time=True)

    judge_again(run, searched(), jury, store)

    assert (run.verdicts, jury.deadlines_s, n_stored(store)) == ({}, [], 0)
