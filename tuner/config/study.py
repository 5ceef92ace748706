"""One search of a space, kept as an Optuna study: resumed, shared between processes, shown in a dashboard.

The walk (`walk.py`) asks for configurations, an evaluator answers, and the study keeps every answer as a
trial. To resume is to ask again: known answers are replayed at once, and several processes with one study
divide the work. A configuration is timed slice by slice of the trace, and Optuna's pruner (`pruner.py`) ends
it early when it is hopeless. This module decides the order and the end; the clock is the caller's."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from phasewise.kerneldb.location import Location
from phasewise.kerneldb.records import MachineKey
from phasewise.tuner.config.lengths import Trace
from phasewise.tuner.config.simulate import Objective, Remembered, StepGrid, cost_ms
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.steps import StepEvaluator, StepTimer
from phasewise.tuner.config.storage import open_storage, quiet
from phasewise.tuner.config.trace import slices
from phasewise.tuner.config.trials import Claim, Known, State, TrialEntry, Trials
from phasewise.tuner.config.walk import (
    Candidate,
    CandidateBatch,
    Decision,
    PrunedTree,
    Rules,
    Stopped,
    refine,
    walk,
)
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import Phase
from phasewise.tuner.search.protocol import drive
from phasewise.tuner.topotree import Configuration

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage

SLICES = 5
"""Slices that a trace is cut into."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.2
"""Seconds between two checks for another process's results: the first pause and the longest; each pause is
twice the last."""

MAX_NAME_CHARS = 400

End = Literal["complete", "budget", "interrupted"]
Scored: TypeAlias = tuple[Configuration, float]
SliceCost: TypeAlias = Callable[[StepTimer], float]


@dataclass(frozen=True)
class StudyKey:
    """The identity of a study: everything that can change an answer."""

    machine: MachineKey
    model: str
    phase: Phase
    objective: str
    trace: str
    """A digest of the trace's requests."""
    evaluator: str
    """The evaluator's kind, and whatever else its answers depend on, such as the build of the kernels."""

    @property
    def name(self) -> str:
        """The study's name in the storage: readable, and different for different keys."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()
        words = f"{self.model} {self.phase} {self.objective} {self.evaluator}"
        return f"{words[:MAX_NAME_CHARS]} {digest}"


@dataclass(frozen=True)
class SearchTask:
    """The goal of a search, and the evaluator that times steps."""

    key: StudyKey
    evaluator: StepEvaluator
    costs: tuple[SliceCost, ...]
    """One cost function per slice of the trace (`slice_costs`); a configuration's cost is their mean."""


@dataclass(frozen=True)
class SearchSettings:
    """The rules of a search, and whether it continues an older study."""

    rules: Rules = field(default_factory=Rules)
    top_k: int = 10
    resume: bool = True
    """Continue the newest study of the key; else begin a new one."""


@dataclass(frozen=True)
class Tried:
    """A configuration with its answer, as reported."""

    number: int
    """Serial number of the answer in this run, from 1."""
    candidate: Candidate
    state: State
    is_replayed: bool
    """True if the answer is an older run's or another process's."""
    cost_ms: float | None
    """Mean milliseconds of the trace on the configuration; None: it cannot run."""
    reason: str | None
    best: Scored | None
    evaluations: int
    """Answers that this process has timed so far."""
    configurations: int
    """Configurations in the whole space."""


Event: TypeAlias = Tried | PrunedTree | Stopped


@dataclass(frozen=True)
class SearchOutcome:
    """The result of a search, complete or not."""

    end: End
    best: Scored | None
    top: tuple[Scored, ...]
    """The `top_k` configurations of least cost, best first, of those timed to the end."""
    configurations: int
    """Configurations in the whole space."""
    tried: int
    """Configurations with an answer, timed or replayed."""
    evaluations: int
    """Answers that this process has timed, also if stopped early."""
    replayed: int
    pruned: int
    """Tried configurations whose timing was stopped early."""
    failed: int
    study: str
    """The study's name in the storage."""
    trees_cut: int
    """Trees whose descendants at a cross-section were skipped."""
    groups_stopped: int


def slice_costs(
    objective: Objective, phase: Phase, trace: Trace, count: int = SLICES
) -> tuple[SliceCost, ...]:
    """A cost function, given a timer, for each slice of a trace; all use the steps of one grid."""
    grid = StepGrid.of(trace, objective, phase)
    return tuple(partial(cost_ms, objective, phase, requests, grid=grid) for requests in slices(trace, count))


def run(
    space: ConfigSpace,
    task: SearchTask,
    location: Location,
    settings: SearchSettings | None = None,
    stop: Callable[[], bool] = lambda: False,
    report: Callable[[Event], None] = lambda event: None,
) -> SearchOutcome:
    """Search until the walk ends, `stop` returns True (asked before every timing), or Ctrl-C. A configuration
    that cannot run has infinite cost. KernelDbError if the database cannot be used."""
    settings = settings or SearchSettings()
    storage = open_storage(location)
    search = _Search(space, task, _open_trials(storage, task, settings, location.name), settings, report)
    end = search.until(stop)
    return search.outcome(end)


class _Ended(Exception):
    """The search is stopped in the middle of a batch."""


class _Search:
    """One run of a search, which answers the walk's questions."""

    def __init__(
        self,
        space: ConfigSpace,
        task: SearchTask,
        trials: Trials,
        settings: SearchSettings,
        report: Callable[[Event], None],
    ) -> None:
        self._space = space
        self._task = task
        self._trials = trials
        self._settings = settings
        self._report = report
        self._configurations = space.n_configurations
        self._candidates: dict[str, Candidate] = {}
        self._known: dict[str, Known] = {}
        self._own: set[str] = set()
        self._best: Scored | None = None
        self._trees_cut = 0
        self._groups_stopped = 0

    def until(self, stop: Callable[[], bool]) -> End:
        """Search until the walk ends or `stop` says so; returns why it ended."""

        def answer(ask: CandidateBatch) -> list[float]:
            self._decided(ask.decisions)
            return self._answer(ask, stop)

        try:
            self._decided(drive(walk(self._space, self._settings.rules), answer))
            if self._space.uneven is not None:
                self._decided(drive(refine(self._space, self._answers()), answer))
            return "complete"
        except _Ended:
            return "budget"
        except KeyboardInterrupt:
            return "interrupted"

    def outcome(self, end: End) -> SearchOutcome:
        """The result of the search so far."""
        states = [answer.state for answer in self._known.values()]
        complete = [
            (self._candidates[key].configuration, answer.cost_ms)
            for key, answer in self._known.items()
            if answer.state == "complete" and answer.cost_ms is not None
        ]
        return SearchOutcome(
            end=end,
            best=self._best,
            top=tuple(sorted(complete, key=lambda scored: scored[1])[: self._settings.top_k]),
            configurations=max(self._configurations, len(self._known)),
            tried=len(self._known),
            evaluations=len(self._own),
            replayed=len(self._known.keys() - self._own),
            pruned=states.count("pruned"),
            failed=states.count("failed"),
            study=self._trials.study_name,
            trees_cut=self._trees_cut,
            groups_stopped=self._groups_stopped,
        )

    def _answers(self) -> dict[str, Scored]:
        """All configurations with an answer so far, by key."""
        return {
            key: (candidate.configuration, self._cost(candidate))
            for key, candidate in self._candidates.items()
            if key in self._known
        }

    def _decided(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self._trees_cut += isinstance(decision, PrunedTree)
            self._groups_stopped += isinstance(decision, Stopped)
            self._report(decision)

    def _answer(self, ask: CandidateBatch, stop: Callable[[], bool]) -> list[float]:
        """The costs of a batch: known to the study, timed now by other processes, or timed here."""
        waiting = {candidate.configuration.key: candidate for candidate in ask.candidates}
        self._candidates.update(waiting)
        pause_s = FIRST_PAUSE_S
        while True:
            elsewhere = self._take(waiting)
            if not waiting:
                break
            if stop():
                raise _Ended
            free = [candidate for key, candidate in waiting.items() if key not in elsewhere]
            if self._task.evaluator.kind != "measured":
                self._calculate(free, stop)
            # From the other end if another process works already, or both would take the same configurations.
            elif free and (claim := self._trials.claim(self._entry(free[-1 if elsewhere else 0]))):
                self._evaluate(claim, self._candidates[claim.key])
            if not free:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return [self._cost(candidate) for candidate in ask.candidates]

    def _calculate(self, free: Sequence[Candidate], stop: Callable[[], bool]) -> None:
        for candidate in free:
            if stop():
                raise _Ended
            self._evaluate(self._trials.draft(self._entry(candidate)), candidate)

    def _take(self, waiting: dict[str, Candidate]) -> set[str]:
        """Read answers from the study; return the configurations that other processes are timing."""
        answers, elsewhere = self._trials.look()
        for key in [key for key in waiting if key in answers or key in self._known]:
            candidate = waiting.pop(key)
            if key not in self._known:
                self._learn(candidate, answers[key])
        return elsewhere

    def _learn(self, candidate: Candidate, answer: Known) -> None:
        self._known[candidate.configuration.key] = answer
        best_ms = self._best[1] if self._best else math.inf
        if answer.state == "complete" and answer.cost_ms is not None and answer.cost_ms < best_ms:
            self._best = candidate.configuration, answer.cost_ms
        self._report(
            Tried(
                number=len(self._known),
                candidate=candidate,
                state=answer.state,
                is_replayed=candidate.configuration.key not in self._own,
                cost_ms=answer.cost_ms,
                reason=answer.reason,
                best=self._best,
                evaluations=len(self._own),
                configurations=max(self._configurations, len(self._known)),
            )
        )

    def _cost(self, candidate: Candidate) -> float:
        cost_ms = self._known[candidate.configuration.key].cost_ms
        return math.inf if cost_ms is None else cost_ms

    def _evaluate(self, claim: Claim, candidate: Candidate) -> None:
        """Time a configuration, and store the result."""
        try:
            self._time(claim, candidate.configuration)
        except EvaluationError as error:
            self._trials.fail(claim, str(error))
        except BaseException:
            self._trials.give_back(claim)
            raise
        self._own.add(candidate.configuration.key)

    def _time(self, claim: Claim, configuration: Configuration) -> None:
        costs_ms: list[float] = []
        with self._task.evaluator.open(configuration, self._task.key.phase) as opened:
            timer = Remembered(opened)
            for cost in self._task.costs:
                costs_ms.append(cost(timer))
                is_hopeless = self._trials.report(
                    claim, math.fsum(costs_ms) / len(costs_ms), len(costs_ms) - 1
                )
                if is_hopeless and self._settings.rules.pruning and len(costs_ms) < len(self._task.costs):
                    self._trials.prune(claim)
                    return
        self._trials.complete(claim, math.fsum(costs_ms) / len(costs_ms))

    def _entry(self, candidate: Candidate) -> TrialEntry:
        """A configuration as a trial, with the attributes that a dashboard shows."""
        ranks, tree, fundamental = candidate.configuration.ranks, candidate.tree, self._space.tree
        nodes = {rank.numa_node for rank in ranks}
        pus_a_core = tree.levels[-1].kept if tree.levels and tree.levels[-1].kind == "pu" else 1
        return TrialEntry(
            key=candidate.configuration.key,
            rival=candidate.rival.key if candidate.rival else None,
            parameters={
                "ranks": len(ranks),
                "pus_per_rank": max(len(rank.cores) for rank in ranks),
                "pus_per_core": pus_a_core,
                "pus_removed": len(set(fundamental.pus).difference(*(rank.cores for rank in ranks))),
                "numa_nodes": len(nodes - {None}),
            },
            remarks={
                "tree": candidate.notation,
                "parent": candidate.parent.notation if candidate.parent else None,
                "plan": candidate.configuration.plan(self._task.key.phase).to_json(),
            },
        )


def _open_trials(
    storage: BaseStorage, task: SearchTask, settings: SearchSettings, location_name: str
) -> Trials:
    """The trials of the study, which is created if missing, or if a new one is wanted."""
    import optuna

    from phasewise.tuner.config.pruner import TransformationTreePruner
    from phasewise.tuner.config.storage import clear_storage_errors

    with clear_storage_errors(location_name), quiet():
        study = optuna.create_study(
            storage=storage,
            study_name=_study_name(storage, task.key, settings.resume),
            sampler=optuna.samplers.RandomSampler(settings.rules.seed),
            pruner=TransformationTreePruner(),
            direction="minimize",
            load_if_exists=True,
        )
        _describe(study, task.key)
        return Trials(study, storage, location_name)


def _study_name(storage: BaseStorage, key: StudyKey, resume: bool) -> str:
    """The name of the key's newest study, or of the next one."""
    taken = {study.study_name for study in storage.get_all_studies()}
    number = 1
    while _numbered(key.name, number + 1) in taken:
        number += 1
    if not resume and _numbered(key.name, number) in taken:
        number += 1
    return _numbered(key.name, number)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} #{number}"


def _describe(study: optuna.Study, key: StudyKey) -> None:
    if study.user_attrs:
        return
    for name in ("model", "phase", "objective", "trace", "evaluator"):
        study.set_user_attr(name, getattr(key, name))
    study.set_user_attr("machine", [key.machine.core_sig, key.machine.placement_sig])
