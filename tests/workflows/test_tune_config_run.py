"""The last run of a search: finalists, the verdict, and the time that one phase leaves to another."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from phasewise.kerneldb.records import Comparison, PlanRecord
from phasewise.kerneldb.store import Store, open_store
from phasewise.tuner.config.references import Reference
from phasewise.tuner.config.simulate import Objective
from phasewise.tuner.config.steps import ModelShape
from phasewise.tuner.config.study import SearchOutcome
from phasewise.tuner.config.trace import RequestLengths
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import Phase, RankCores, ServicePlan, machine_key
from phasewise.tuner.topotree import Configuration, OperatorLimits
from phasewise.workflows.tune_config.run import Run, judge, judge_again
from phasewise.workflows.tune_config.settings import Show, TuneConfigSettings
from phasewise.workflows.tune_config.subject import Searched, Subject
from phasewise.workflows.tune_config.verdict import (
    TIMINGS_A_DUEL,
    PhaseVerdict,
    decide,
    evaluations_of_last_run,
    finalists,
    last_run,
)
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


LATER_S = math.inf


def plan(*ranks: Sequence[int]) -> ServicePlan:
    return ServicePlan("decode", tuple(RankCores(tuple(cores)) for cores in ranks))


ALL, HALF, TWO, ONE = plan(range(8)), plan(range(4)), plan(range(4), range(4, 8)), plan((0,))
HABITS = (Reference("all cores", ALL), Reference("physical", HALF), Reference("nodes", None, "8 ranks of 3"))


class FormulaJury:
    """Costs by plan; intervals of some width around the true ratio."""

    is_timed = True

    def __init__(self, costs: Mapping[ServicePlan, float], width: float = 0.01) -> None:
        self.costs = costs
        self.width = width
        self.compared: list[ServicePlan] = []

    def cost_ms(self, plan: ServicePlan) -> float:
        if plan not in self.costs:
            raise EvaluationError("it cannot run")
        return self.costs[plan]

    def compare(self, reference: ServicePlan, plan: ServicePlan, deadline_s: float) -> Comparison | None:
        self.compared.append(reference)
        if time.monotonic() >= deadline_s:
            return None
        gain = self.costs[reference] / self.costs[plan]
        return Comparison(gain, gain * (1 - self.width), gain * (1 + self.width), 0.99, 15)


def judged(jury: FormulaJury, top: Sequence[ServicePlan], deadline_s: float = LATER_S) -> PhaseVerdict:
    chosen = finalists([(service_plan, jury.costs.get(service_plan, 5.0)) for service_plan in top], HABITS)
    verdict = decide("decode", last_run(chosen, jury, LATER_S), HABITS, jury, deadline_s)
    assert verdict is not None
    return verdict


def test_a_plan_that_beats_every_reference_is_the_one() -> None:
    verdict = judged(FormulaJury({TWO: 2.0, ALL: 4.0, HALF: 3.0}), [TWO, ALL])

    assert (verdict.plan, verdict.standing, verdict.latency_ms) == (TWO, "faster", 2.0)
    assert [versus.gain for versus in verdict.against] == [2.0, 1.5, None]
    assert verdict.against[2].reason == "8 ranks of 3"


def test_a_reference_that_wins_the_last_run_is_kept_and_nothing_was_gained() -> None:
    """Whatever the search thought of it."""
    verdict = judged(FormulaJury({TWO: 4.0, ALL: 5.0, HALF: 3.0}), [TWO])

    assert (verdict.plan, verdict.standing, verdict.latency_ms) == (HALF, "reference", 3.0)
    assert [versus.is_same for versus in verdict.against] == [False, True, False]


class PartialJury(FormulaJury):
    """In pairs of turns the last run's winner is the slower one."""

    def compare(self, reference: ServicePlan, plan: ServicePlan, deadline_s: float) -> Comparison | None:
        return Comparison(0.8, 0.78, 0.82, 0.99, 15)


def test_a_winner_that_the_comparison_finds_slower_does_not_come_into_use() -> None:
    verdict = judged(PartialJury({TWO: 2.9, ALL: 5.0, HALF: 3.0}), [TWO])

    assert (verdict.plan, verdict.standing) == (ALL, "reference")
    assert verdict.winner == TWO


def test_no_proven_difference_is_called_that() -> None:
    verdict = judged(FormulaJury({TWO: 2.99, ALL: 3.0, HALF: 3.2}, width=0.05), [TWO])

    assert (verdict.plan, verdict.standing) == (TWO, "not slower")


def test_references_that_are_one_plan_are_compared_once() -> None:
    jury = FormulaJury({TWO: 2.0, ALL: 4.0})
    habits = (Reference("all cores", ALL), Reference("physical", ALL), Reference("nodes", TWO))
    timed = last_run(finalists([(TWO, 2.0), (ALL, 4.0)], habits), jury, LATER_S)
    verdict = decide("decode", timed, habits, jury, LATER_S)

    assert verdict is not None
    assert jury.compared == [ALL]
    assert [versus.gain for versus in verdict.against] == [2.0, 2.0, None]
    assert verdict.against[2].is_same
    assert verdict.standing == "reference"


def test_only_plans_near_the_best_and_references_go_on() -> None:
    chosen = finalists([(TWO, 2.0), (HALF, 2.9), (ONE, 9.0), (ALL, 9.5)], HABITS)

    assert [finalist.plan for finalist in chosen] == [TWO, HALF, ALL]


def test_a_last_run_is_as_long_as_its_timings_and_comparisons() -> None:
    """One of two references with plans is the best plan itself, and is not compared."""
    few = evaluations_of_last_run(finalists([(ALL, 1.0)], HABITS), HABITS)
    more = evaluations_of_last_run(finalists([(TWO, 1.0)], HABITS), HABITS)

    assert (few, more) == (2 + TIMINGS_A_DUEL, 3 + 2 * TIMINGS_A_DUEL)
    assert evaluations_of_last_run((), ()) == 0


def test_a_reference_that_cannot_run_is_no_reason_to_stop() -> None:
    verdict = judged(FormulaJury({TWO: 2.0, HALF: 3.0}), [TWO])

    assert verdict.standing == "faster"
    assert verdict.against[0].reason == "it cannot run"


def test_without_time_to_compare_a_reference_is_kept() -> None:
    verdict = judged(FormulaJury({TWO: 2.0, ALL: 4.0, HALF: 3.0}), [TWO], deadline_s=0.0)

    assert (verdict.plan, verdict.standing) == (HALF, "not compared")
    assert verdict.against[0].reason == "the budget was used up"
    assert not verdict.is_settled


def test_a_plan_that_no_reference_can_be_held_against_is_settled() -> None:
    verdict = judged(FormulaJury({TWO: 2.0}), [TWO])

    assert (verdict.plan, verdict.standing) == (TWO, "not compared")
    assert verdict.is_settled


@pytest.mark.parametrize("able", [(), (ONE,)])
def test_nothing_that_runs_is_no_verdict(able: tuple[ServicePlan, ...]) -> None:
    jury = FormulaJury(dict.fromkeys(able, 3.0))
    timed = last_run(finalists([], HABITS), jury, LATER_S)

    assert decide("decode", timed, HABITS, jury, LATER_S) is None
