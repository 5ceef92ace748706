"""Search one phase's configurations: the space, the study that keeps its trials, and the deadline."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from phasewise._files import read_input
from phasewise._words import counted, number
from phasewise.kerneldb.location import Location, locate
from phasewise.tuner.config.simulate import Objective
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.steps import StepEvaluator
from phasewise.tuner.config.study import (
    Event,
    SearchOutcome,
    SearchSettings,
    SearchTask,
    StudyKey,
    Tried,
    run,
    slice_costs,
)
from phasewise.tuner.config.walk import BAND_RULES, Rules
from phasewise.tuner.plans import Phase, nodes_of
from phasewise.tuner.topotree import OperatorLimits, UnevenCores, fundamental
from phasewise.workflows.tune_config.settings import TuneConfigSettings
from phasewise.workflows.tune_config.subject import Subject

IN_MEMORY = "sqlite://"


@dataclass(frozen=True)
class ExactRanks(OperatorLimits):
    """The limits of a model, and plans of exactly `ranks` ranks."""

    ranks: int = 1

    def reason(self, n_ranks: int) -> str | None:
        if n_ranks != self.ranks:
            return f"--ranks {self.ranks} leaves it out"
        return super().reason(n_ranks)


@dataclass(frozen=True)
class Searched:
    """The search of one phase, and how long it took."""

    phase: Phase
    outcome: SearchOutcome
    elapsed_s: float
    failures: Mapping[str, int]
    """The number of configurations that could not run for the same reason."""


def study_location(wish: TuneConfigSettings) -> Location:
    """The location of trials: what is only modelled is forgotten unless `--storage` says where."""
    if wish.storage is not None:
        return locate(wish.storage)
    return locate(wish.db if wish.evaluator == "measured" else IN_MEMORY)


def objective_words(objective: Objective) -> str:
    """The objective in a few words that name a study, e.g. `e2e, 4 sequences at once`."""
    slo = objective.slo
    bounds = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms} if slo else {}
    within = [f"{name} {number(bound)} ms" for name, bound in bounds.items() if bound is not None]
    together = [f"{counted(objective.concurrency, 'sequence')} at once"] if objective.concurrency > 1 else []
    return ", ".join([objective.kind, *within, *together])


def space_of(subject: Subject) -> ConfigSpace:
    """The configurations to choose from."""
    limits = subject.limits
    if subject.ranks is not None:
        limits = ExactRanks(
            limits.n_heads, limits.n_kv_heads, limits.head_dim, limits.ffn, ranks=subject.ranks
        )
    tree = fundamental(subject.machine).tree
    if subject.below is not None:
        return ConfigSpace(tree, limits, nodes=nodes_of(subject.below.ranks))
    uneven = UnevenCores.of(subject.machine, tree.pus, subject.slow)
    return ConfigSpace(tree, limits, uneven=uneven)


def search(
    subject: Subject,
    phase: Phase,
    wish: TuneConfigSettings,
    evaluator: StepEvaluator,
    deadline_s: float,
    report: Callable[[Event], None],
) -> Searched:
    """The phase's configurations, until the deadline (`time.monotonic`) or the end of them."""
    started_s = time.monotonic()
    failures: Counter[str] = Counter()

    def heard(event: Event) -> None:
        if isinstance(event, Tried) and event.reason:
            failures[event.reason] += 1
        report(event)

    key = StudyKey(
        machine=subject.key,
        model=subject.model_key,
        phase=phase,
        objective=objective_words(subject.objective),
        trace=subject.trace_digest,
        evaluator=f"{evaluator.kind} {_answers_digest(subject, wish)}",
    )
    outcome = run(
        space_of(subject),
        SearchTask(key, evaluator, slice_costs(subject.objective, phase, subject.trace)),
        study_location(wish),
        SearchSettings(
            replace(Rules() if subject.below is None else BAND_RULES, seed=wish.seed), wish.top_k, wish.resume
        ),
        stop=lambda: time.monotonic() >= deadline_s,
        report=heard,
    )
    return Searched(phase, outcome, time.monotonic() - started_s, failures)


def _answers_digest(subject: Subject, wish: TuneConfigSettings) -> str:
    """Digest of all that an evaluator's answers depend on besides machine, model and requests."""
    from phasewise.cython_kernels._native import kernel_abi
    from phasewise.tuner.config.sharing import MAX_FILE_BYTES

    hidden = read_input(wish.hidden, MAX_FILE_BYTES) if wish.hidden else b""
    what = kernel_abi("gemm") if wish.evaluator == "measured" else f"{subject.shape} {subject.machine}"
    return hashlib.sha256(what.encode() + hidden).hexdigest()[:12]
