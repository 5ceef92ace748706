"""One run of `tune-config`: search, kernels, last run, verdict, plan; whatever is known survives Ctrl-C.

Half of a measured run's budget is for the search, which trial by trial goes into its study. Of the rest, the
kernels of the best plans get what the last run does not need.

Nothing is timed for a machine that is modelled: all of the budget is for its search. Its plan is printed and
not stored, because only what ran on a machine may come into use there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.kerneldb.records import Origin, PlanRecord
from phasewise.tuner.plans import Phase, ServicePlan, placed_json
from phasewise.workflows.tune_config.settings import Show, TuneConfigSettings
from phasewise.workflows.tune_config.subject import Searched, Subject, search, study_location
from phasewise.workflows.tune_config.verdict import (
    CalculatedJury,
    Finalist,
    Jury,
    MeasuredJury,
    PhaseVerdict,
    decide,
    evaluations_of_last_run,
    finalists,
    habits_of,
    last_run,
)

if TYPE_CHECKING:
    from phasewise.kerneldb.store import Store
    from phasewise.tuner.config.recorded import Kernels, PlanTiming
    from phasewise.tuner.config.steps import StepEvaluator
    from phasewise.tuner.measurement_lock import MeasurementLock
    from phasewise.workflows.tune_config.measured_evaluator import MeasuredEvaluator, Plans, Schedules
    from phasewise.workflows.tune_kernels.rounds import TunedRound

SEARCH_SHARE = 0.5
LAST_RUN_SHARE, MOST_LAST_RUN_SHARE = 0.2, 0.4
"""Least and most of a measured run's budget for its last run, as shares."""

LEAST_LAST_RUN_S = 0.1
LEAST_TIMED_SHARE = 0.3
"""Least share of a phase's last run for timing the finalists; the rest is for comparisons."""

LEAST_KERNEL_S = 5.0
"""Least seconds for tuning kernels: fewer do not suffice to measure the limits of some cores."""

End = Literal["complete", "budget", "interrupted"]


@dataclass
class Found:
    """The results of a run, so far or at its end."""

    wish: TuneConfigSettings
    subject: Subject
    searched: list[Searched] = field(default_factory=list)
    verdicts: dict[Phase, PhaseVerdict] = field(default_factory=dict)
    kernels: list[TunedRound] = field(default_factory=list)
    stored: set[Phase] = field(default_factory=set)
    end: End = "complete"
    elapsed_s: float = 0.0
    laps: int = 0
    disturbed: int = 0
    bands: tuple[Found, ...] = ()
    """The runs for each further number of sequences that decode together (`loads.tune_loads`)."""

    @property
    def sequences(self) -> int:
        """The number of sequences that decode together."""
        return self.subject.objective.concurrency

    @property
    def decode_plan(self) -> ServicePlan | None:
        """Decode's plan with the bands that were found up to this one; None where there is none to use."""
        return plan_to_keep(self.subject, self.verdicts.get("decode"))

    @property
    def objectives(self) -> Mapping[str, float]:
        """The figures of `decode_plan` when it was measured."""
        return objectives_of(self.subject, self.verdicts.get("decode"))


def plan_to_keep(subject: Subject, verdict: PhaseVerdict | None) -> ServicePlan | None:
    """The plan of a verdict; for a band's verdict, the plan for fewer sequences with the band."""
    if verdict is None or not verdict.is_settled:
        return subject.below
    if subject.below is None:
        return verdict.plan
    return subject.below.with_band(subject.objective.concurrency, verdict.plan.ranks)


def objectives_of(subject: Subject, verdict: PhaseVerdict | None) -> Mapping[str, float]:
    """The figures of a plan; of one with bands, those of each."""
    if verdict is None or not verdict.is_settled:
        return subject.objectives_below
    of_band = "" if subject.below is None else f"_{subject.objective.concurrency}"
    return {**subject.objectives_below, f"{subject.objective.kind}{of_band}_ms": verdict.latency_ms}


@dataclass(kw_only=True)
class Run(Found):
    """A run under way."""

    show: Show
    started_s: float
    lock: MeasurementLock

    def deadline_s(self, share: float = 1.0) -> float:
        """The time at which this share of the budget is spent."""
        return self.started_s + share * self.wish.budget_s


def tune(
    wish: TuneConfigSettings, subject: Subject, started_s: float, show: Show, lock: MeasurementLock
) -> Found:
    """Search, tune kernels, compare and store, within the wish's budget. Ctrl-C ends it early.

    started_s: when the command began, by `time.monotonic`. lock: taken while anything is timed.
    """
    run = Run(wish, subject, show=show, started_s=started_s, lock=lock)
    measured: MeasuredEvaluator | None = None
    try:
        if wish.evaluator == "measured":
            from phasewise.kerneldb.store import open_store

            left_s = run.deadline_s() - time.monotonic()
            with lock.turn(left_s), open_store(wish.db, run.show.say) as store:
                measured = _evaluator(run, store, "default")
                measured.deadline_s = run.deadline_s()
                _run_measured(run, measured, store)
        else:
            _run_calculated(run)
    except KeyboardInterrupt:
        run.end = "interrupted"
    if measured is not None:
        run.laps, run.disturbed = len(measured.tally.laps), measured.tally.disturbed
    run.elapsed_s = time.monotonic() - started_s
    return run


# ---- nothing is timed --------------------------------------------------------------------------------------


def _run_calculated(run: Run) -> None:
    from phasewise.tuner.config.modelled import ModelledEvaluator
    from phasewise.tuner.config.sharing import read_hidden

    wish, subject = run.wish, run.subject
    hidden = read_hidden(wish.hidden, subject.kept_on) if wish.hidden else ()
    evaluator = ModelledEvaluator(subject.machine, subject.shape, hidden=hidden)
    with _opened_study(run):
        if not _search(run, evaluator, 1.0):
            return
        for searched in run.searched:
            jury = CalculatedJury(evaluator, run.subject, searched.phase)
            judge(run, searched, jury, math.inf)


# ---- measured ----------------------------------------------------------------------------------------------


def _evaluator(run: Run, store: Store, kernels: Kernels) -> MeasuredEvaluator:
    """An evaluator with the default schedules, the same for all configurations, or with those in use."""
    from phasewise.tuner.plans import PHASES
    from phasewise.workflows.opening.tuned_schedules import schedules_for
    from phasewise.workflows.tune_config.measured_evaluator import MeasuredEvaluator, Room

    def schedules(plans: Plans) -> Schedules | None:
        if kernels == "default":
            return None
        return schedules_for(run.wish.db, subject.machine, plans, run.show.say)

    subject = run.subject
    assert subject.model is not None
    room = Room.for_steps(step for phase in PHASES for step in subject.grid(phase).steps)
    keep = _keeper(subject, store, kernels)
    return MeasuredEvaluator(subject.model, subject.machine, room, schedules, keep, run.lock)


def _keeper(subject: Subject, store: Store, kernels: Kernels) -> Callable[[PlanTiming], None]:
    """A callback that appends readings to the database."""
    from phasewise.cython_kernels._native import kernel_abi
    from phasewise.tuner.config.recorded import keep
    from phasewise.tuner.ledger import Scope

    if not store.writable:
        return lambda reading: None
    scope = Scope(subject.key, kernel_abi("gemm"), __version__)
    return lambda reading: keep(store, scope, subject.kept_on, subject.model_key, reading, kernels)


def _run_measured(run: Run, plain: MeasuredEvaluator, store: Store) -> None:
    with _opened_study(run):
        if not _search(run, plain, SEARCH_SHARE):
            return
    chosen: dict[Phase, tuple[Finalist, ...]] = {
        searched.phase: _finalists(run.subject, searched) for searched in run.searched
    }
    needed_s = _last_run_s(run, chosen)
    if not _tune_kernels(run, chosen, run.deadline_s() - sum(needed_s.values()), store):
        return
    tuned = _evaluator(run, store, "tuned")
    tuned.tally, tuned.deadline_s = plain.tally, plain.deadline_s
    _last_runs(run, tuned, needed_s, store)


def _last_runs(run: Run, tuned: MeasuredEvaluator, needed_s: Mapping[Phase, float], store: Store) -> None:
    """Judge each phase in its share of the time that is left."""
    for place, searched in enumerate(run.searched):
        now_s, left = time.monotonic(), [needed_s[other.phase] for other in run.searched[place:]]
        deadline_s = now_s + left[0] / sum(left) * (run.deadline_s() - now_s)
        judge(run, searched, MeasuredJury(tuned, run.subject, searched.phase), deadline_s)
        _keep_plan(run, searched.phase, store)
    for searched in run.searched:
        judge_again(run, searched, MeasuredJury(tuned, run.subject, searched.phase), store)


def judge_again(run: Run, searched: Searched, jury: Jury, store: Store) -> None:
    """Judge a phase again in the run's remaining time, if the phase's own did not suffice for comparisons."""
    before = run.verdicts.get(searched.phase)
    if before is None or before.is_settled or time.monotonic() >= run.deadline_s():
        return
    judge(run, searched, jury, run.deadline_s())
    _keep_plan(run, searched.phase, store)


@contextmanager
def _opened_study(run: Run) -> Iterator[None]:
    """Open the database of the study before Optuna does, so that it exists and is ours."""
    wish, location = run.wish, study_location(run.wish)
    if location.url == "sqlite://":
        yield
        return
    from phasewise.kerneldb.store import open_store

    with open_store(wish.storage or wish.db, run.show.say):
        yield


def _search(run: Run, evaluator: StepEvaluator, share: float) -> bool:
    """Search each phase in turn; time that a phase leaves goes to the next. False when interrupted."""
    phases = run.wish.phases
    for place, phase in enumerate(phases):
        deadline_s = run.deadline_s(share * (place + 1) / len(phases))
        report = run.show.searching(phase)
        run.searched.append(search(run.subject, phase, run.wish, evaluator, deadline_s, report))
        outcome = run.searched[-1].outcome
        if outcome.end == "interrupted":
            run.end = "interrupted"
            return False
        if outcome.end == "budget":
            run.end = "budget"
    return True


def _finalists(subject: Subject, searched: Searched) -> tuple[Finalist, ...]:
    top = [(configuration.plan(searched.phase), cost_ms) for configuration, cost_ms in searched.outcome.top]
    return finalists(top, habits_of(subject, searched.phase))


def judge(run: Run, searched: Searched, jury: Jury, deadline_s: float) -> None:
    now_s = time.monotonic()
    run.show.stage(f"last run of {searched.phase}")
    habits, chosen = habits_of(run.subject, searched.phase), _finalists(run.subject, searched)
    if not chosen:
        return
    share = max(LEAST_TIMED_SHARE, len(chosen) / evaluations_of_last_run(chosen, habits))
    timed = last_run(chosen, jury, now_s + share * (deadline_s - now_s))
    verdict = decide(searched.phase, timed, habits, jury, deadline_s)
    if verdict is not None:
        run.verdicts[searched.phase] = verdict


def _keep_plan(run: Run, phase: Phase, store: Store) -> None:
    verdict = run.verdicts.get(phase)
    plan = plan_to_keep(run.subject, verdict)
    if plan is None or verdict is None or not verdict.is_settled or not store.writable:
        return
    run.stored.add(phase)
    if plan == run.subject.below:
        return  # the band's cores are those for fewer sequences, whose plan is stored
    origin = Origin(run.subject.key, __version__, time.time_ns() // 1_000_000)
    plan_json = placed_json(plan, run.subject.kept_on)
    objectives = objectives_of(run.subject, verdict)
    store.add([PlanRecord(run.subject.model_key, phase, plan_json, origin, objectives)])


# ---- kernels -----------------------------------------------------------------------------------------------


def _tune_kernels(
    run: Run, chosen: Mapping[Phase, Sequence[Finalist]], deadline_s: float, store: Store
) -> bool:
    """Tune the finalists' products on their ranks' cores, the best plans' first. False: interrupted.

    Each plan may take half of the time that is left: the best plan's products are worth the most.
    """
    from phasewise.workflows.tune_kernels.rounds import Tuning, tune_round
    from phasewise.workflows.tune_kernels.run import kernel_rounds

    assert run.subject.model is not None
    plans = [finalist.plan for turn in zip_longest(*chosen.values()) for finalist in turn if finalist]
    machine = run.subject.machine
    rounds = kernel_rounds(run.subject.model, machine, plans)
    tuning = Tuning(machine, store, run.lock, progress=run.show.tuning, resume=run.wish.resume)
    for place, tuning_round in enumerate(rounds):
        left_s = deadline_s - time.monotonic()
        if left_s < LEAST_KERNEL_S:
            run.show.say(
                f"no time is left for the kernels of {len(rounds) - place} of {counted(len(rounds), 'plan')}"
            )
            run.end = "budget"
            break
        share_s = left_s if place == len(rounds) - 1 else left_s / 2
        run.show.say(f"kernels: {tuning_round.describe()}, at most {share_s:.0f} s")
        run.kernels.append(tune_round(tuning_round, tuning, share_s))
        if run.kernels[-1].is_interrupted:
            run.end = "interrupted"
            return False
        if run.kernels[-1].outcome.end == "budget":
            run.end = "budget"
    return True


def _last_run_s(run: Run, chosen: Mapping[Phase, Sequence[Finalist]]) -> dict[Phase, float]:
    """Seconds to keep for each phase's last run, from the search's time for a configuration."""
    needed_s = {}
    for searched in run.searched:
        evaluation_s = searched.elapsed_s / max(1, searched.outcome.evaluations)
        count = evaluations_of_last_run(chosen[searched.phase], habits_of(run.subject, searched.phase))
        needed_s[searched.phase] = max(LEAST_LAST_RUN_S, evaluation_s * count)
    least_s, most_s = (share * run.wish.budget_s for share in (LAST_RUN_SHARE, MOST_LAST_RUN_SHARE))
    total_s = sum(needed_s.values())
    scale = min(most_s, max(least_s, total_s)) / total_s
    return {phase: scale * seconds for phase, seconds in needed_s.items()}
