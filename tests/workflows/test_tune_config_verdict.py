"""Finalists, the last run and the verdict, with costs that a formula gives."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import pytest

from phasewise.kerneldb.records import Comparison
from phasewise.tuner.config.references import Reference
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import RankCores, ServicePlan
from phasewise.workflows.tune_config.verdict import (
    TIMINGS_A_DUEL,
    PhaseVerdict,
    decide,
    evaluations_of_last_run,
    finalists,
    last_run,
)

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
