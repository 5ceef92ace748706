"""From the best plans of a search to the plan in use: a last run, comparisons with references, a verdict.

The order of a measured run: the best plans of the search and the three references get the kernels that the
budget allows; all are timed again with them; the fastest is held against each reference in pairs of turns. It
comes into use only if the comparison does not say that a reference is faster. Where nothing is timed, costs
are compared as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from phasewise.kerneldb.records import Comparison
from phasewise.tuner import timing
from phasewise.tuner.config.references import FEWER, Reference, references, same_cores
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import Phase, ServicePlan, nodes_of
from phasewise.tuner.topotree import Configuration

if TYPE_CHECKING:
    from phasewise.tuner.config.steps import StepEvaluator
    from phasewise.workflows.tune_config.measured_evaluator import MeasuredEvaluator
    from phasewise.workflows.tune_config.subject import Subject


FINALIST_MARGIN = 1.5
"""Plans slower than the best one by more than this factor get no kernels of their own."""

LEAST_PAIRS = 8
"""Least pairs of a comparison: with fewer, an interval of `timing.CONFIDENCE` does not exist."""

TIMINGS_A_DUEL = 6
"""Time of a comparison over the time of timing one plan."""

PAIRS_AT_ONCE = 2
"""Pairs of turns that are timed in a row; each contestant begins one of them."""

Standing = Literal["faster", "not slower", "reference", "not compared"]
"""faster: proven against the best reference. not slower: no difference proven. reference: the best plan is
one. not compared: no reference can run, or the budget did not suffice."""


@dataclass(frozen=True)
class Finalist:
    """A plan of the search, or a reference, and what it cost there and in the last run."""

    plan: ServicePlan
    search_ms: float | None
    final_ms: float | None = None
    reason: str | None = None
    """The reason why there is no final cost."""

    @property
    def cost_ms(self) -> float:
        latest_ms = self.final_ms if self.final_ms is not None else self.search_ms
        return math.inf if latest_ms is None else latest_ms


@dataclass(frozen=True)
class Versus:
    """The winner compared with one reference."""

    reference: Reference
    is_same: bool
    latency_ms: float | None = None
    gain: float | None = None
    """Speed-up of the winner over the reference."""
    comparison: Comparison | None = None
    reason: str | None = None
    """The reason why there is no gain."""


@dataclass(frozen=True)
class PhaseVerdict:
    phase: Phase
    plan: ServicePlan
    """The plan to use from now on."""
    latency_ms: float
    winner: ServicePlan
    """The fastest plan of the last run; `plan` is another where a reference is not beaten."""
    standing: Standing
    against: tuple[Versus, ...]
    finalists: tuple[Finalist, ...]

    @property
    def is_settled(self) -> bool:
        """True if `plan` may replace a plan in use: not if references could run and time ran out for them."""
        return self.standing != "not compared" or all(versus.latency_ms is None for versus in self.against)


class Jury(Protocol):
    """Times or computes the cost of whole plans by a phase's objective."""

    is_timed: bool
    """True if clocks decide, so that a difference has to be proven."""

    def cost_ms(self, plan: ServicePlan) -> float:
        """The plan's cost in milliseconds. EvaluationError if the plan cannot run."""
        ...

    def compare(self, reference: ServicePlan, plan: ServicePlan, deadline_s: float) -> Comparison | None:
        """Compare a plan with a reference; None: nothing is timed, or the time did not suffice."""
        ...


class MeasuredJury:
    """Runs plans of one phase on their cores."""

    is_timed = True

    def __init__(self, evaluator: MeasuredEvaluator, subject: Subject, phase: Phase) -> None:
        self._evaluator = evaluator
        self._cost = subject.cost(phase)
        self._steps = subject.grid(phase).steps

    def cost_ms(self, plan: ServicePlan) -> float:
        with self._evaluator.open_plan(plan) as clock:
            step_times = {step: clock(step) for step in self._steps}
        return self._cost(lambda step: step_times[step])

    def compare(self, reference: ServicePlan, plan: ServicePlan, deadline_s: float) -> Comparison | None:
        taken: list[tuple[timing.Samples, timing.Samples]] = []
        with self._evaluator.duel(reference, plan, self._steps, self._cost) as duel:
            while len(taken) < timing.PAIRS and time.monotonic() < deadline_s:
                taken += duel(PAIRS_AT_ONCE)
        return timing.compare(taken) if len(taken) >= LEAST_PAIRS else None


class CalculatedJury:
    """The jury of an evaluator that always gives the same cost, so that there is nothing to compare."""

    is_timed = False

    def __init__(self, evaluator: StepEvaluator, subject: Subject, phase: Phase) -> None:
        self._evaluator = evaluator
        self._cost = subject.cost(phase)

    def cost_ms(self, plan: ServicePlan) -> float:
        with self._evaluator.open(Configuration(plan.ranks), plan.phase) as timer:
            return self._cost(timer)

    def compare(self, reference: ServicePlan, plan: ServicePlan, deadline_s: float) -> Comparison | None:
        return None


def finalists(top: Sequence[tuple[ServicePlan, float]], habits: Sequence[Reference]) -> tuple[Finalist, ...]:
    """The search's best plans in order, then the references that are not among them."""
    best_ms = min((cost_ms for _, cost_ms in top), default=math.inf)
    chosen = [
        Finalist(plan, cost_ms)
        for plan, cost_ms in top
        if cost_ms <= FINALIST_MARGIN * best_ms or any(habit.has(plan) for habit in habits)
    ]
    for habit in habits:
        if habit.plan is not None and not any(habit.has(finalist.plan) for finalist in chosen):
            chosen.append(Finalist(habit.plan, None))
    return tuple(chosen)


def evaluations_of_last_run(chosen: Sequence[Finalist], habits: Sequence[Reference]) -> int:
    """Number of timings of a plan in a last run that leaves the order as it is."""
    distinct = [finalist.plan for finalist in chosen[:1]]
    for habit in habits:
        if habit.plan and not any(map(habit.has, distinct)):
            distinct.append(habit.plan)
    return len(chosen) + TIMINGS_A_DUEL * max(0, len(distinct) - 1)


def last_run(chosen: Sequence[Finalist], jury: Jury, deadline_s: float) -> tuple[Finalist, ...]:
    """Time each finalist again, the search's best first, as far as the time suffices."""
    return tuple(_timed(finalist, jury, deadline_s) for finalist in chosen)


def _timed(finalist: Finalist, jury: Jury, deadline_s: float) -> Finalist:
    if time.monotonic() >= deadline_s:
        return replace(finalist, reason="the budget was used up")
    try:
        return replace(finalist, final_ms=jury.cost_ms(finalist.plan))
    except EvaluationError as error:
        in_time = time.monotonic() < deadline_s
        return replace(finalist, search_ms=None if in_time else finalist.search_ms, reason=str(error))


def decide(
    phase: Phase, timed: Sequence[Finalist], habits: Sequence[Reference], jury: Jury, deadline_s: float
) -> PhaseVerdict | None:
    """Choose the fastest finalist, unless a reference beats it; None where nothing could be run."""
    able = [finalist for finalist in timed if finalist.cost_ms < math.inf]
    if not able:
        return None
    in_last_run = [finalist for finalist in able if finalist.final_ms is not None]
    winner = min(in_last_run or able, key=lambda finalist: finalist.cost_ms)
    against = tuple(_against(winner, habits, timed, jury, deadline_s))
    standing, plan = _standing(winner, against)
    costs_ms = (finalist.cost_ms for finalist in able if same_cores(finalist.plan, plan))
    latency_ms = next(costs_ms, winner.cost_ms)
    return PhaseVerdict(phase, plan, latency_ms, winner.plan, standing, against, tuple(timed))


def _against(
    winner: Finalist, habits: Sequence[Reference], timed: Sequence[Finalist], jury: Jury, deadline_s: float
) -> Iterator[Versus]:
    """Compare the winner with each reference; references with the same plan share a comparison."""
    compared: list[Versus] = []
    for place, habit in enumerate(habits):
        plan = habit.plan
        if plan is None:
            yield Versus(habit, False, reason=habit.reason)
            continue
        twin = next((earlier for earlier in compared if earlier.reference.has(plan)), None)
        if twin is not None:
            versus = replace(twin, reference=habit)
        else:
            own = next(finalist for finalist in timed if same_cores(finalist.plan, plan))
            now_s = time.monotonic()
            share_s = (deadline_s - now_s) / (len(habits) - place)
            versus = _versus(winner, habit, own, jury, now_s + share_s)
            compared.append(versus)
        yield versus


def _versus(winner: Finalist, habit: Reference, own: Finalist, jury: Jury, deadline_s: float) -> Versus:
    if own.plan == winner.plan or same_cores(own.plan, winner.plan):
        return Versus(habit, True, winner.cost_ms)
    if own.cost_ms == math.inf:
        return Versus(habit, False, reason=own.reason)
    try:
        comparison = jury.compare(own.plan, winner.plan, deadline_s)
    except EvaluationError as error:
        return Versus(habit, False, own.cost_ms, reason=str(error))
    if jury.is_timed and comparison is None:
        return Versus(habit, False, own.cost_ms, reason="the budget was used up")
    gain = comparison.gain if comparison else own.cost_ms / winner.cost_ms
    return Versus(habit, False, own.cost_ms, gain, comparison)


def _standing(winner: Finalist, against: Sequence[Versus]) -> tuple[Standing, ServicePlan]:
    """The winner's standing against the reference that comes closest, and the plan to use."""
    if any(versus.is_same for versus in against):
        return "reference", winner.plan
    compared = [versus for versus in against if versus.gain is not None]
    if not compared:
        timed = [
            (versus.latency_ms, versus.reference.plan) for versus in against if versus.latency_ms is not None
        ]
        fallback = min(timed, key=lambda pair: pair[0], default=(0.0, None))[1]
        return "not compared", fallback or winner.plan
    closest = min(compared, key=lambda versus: versus.gain or 0.0)
    gain = closest.gain or 0.0
    if closest.comparison.proves_faster if closest.comparison else gain > 1.0:
        return "faster", winner.plan
    if gain >= 1.0:
        return "not slower", winner.plan
    assert closest.reference.plan is not None
    return "reference", closest.reference.plan


def habits_of(subject: Subject, phase: Phase) -> tuple[Reference, ...]:
    """The references of a phase on the cores that the subject may use; those of another number of ranks than
    the subject asks for have no plan. For a band also the cores for fewer sequences.
    """
    habits = references(subject.machine, phase, subject.limits.reason)
    if subject.below is not None:
        fewer = subject.below.each[-1]
        unlike = "its ranks, or their NUMA nodes, are others than for fewer sequences"
        likes = (
            replace(habit, plan=None, reason=unlike)
            if habit.plan and nodes_of(habit.plan.ranks) != nodes_of(fewer.ranks)
            else habit
            for habit in habits
        )
        return (*likes, Reference(FEWER, fewer))
    return tuple(
        replace(habit, plan=None, reason=f"--ranks {subject.ranks} leaves it out")
        if habit.plan and subject.ranks not in (None, len(habit.plan.ranks))
        else habit
        for habit in habits
    )
