"""`phasewise tune-config` between its options and its output: what is searched where, and with which timer.

The search itself is `tuner.config.study`'s; what is made of its best plans is `cli.finals`'. Here a command
line becomes a subject: a machine, a model on it, requests and an objective; and each phase gets its share of
the budget, what one leaves going to the next.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.cli.alone import company
from phasewise.cli.options import WeightFormat
from phasewise.cli.present import note
from phasewise.kerneldb.location import MEMORY_URL, Location, locate
from phasewise.kerneldb.records import MachineKey
from phasewise.topology import Machine, read_lstopo, read_machine
from phasewise.tuner.config.simulate import Objective, StepGrid
from phasewise.tuner.config.space import Space
from phasewise.tuner.config.steps import Evaluator, EvaluatorKind, ModelShape
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
from phasewise.tuner.config.trace import Trace, default_trace, fitted, load_trace
from phasewise.tuner.config.walk import Rules
from phasewise.tuner.errors import EvaluationError, PlanError
from phasewise.tuner.plans import (
    Phase,
    ServicePlan,
    list_cores,
    machine_key,
    model_key,
    parse_cores,
    plans_for,
)
from phasewise.tuner.topotree import OperatorLimits, TopoTree, fundamental
from phasewise.workflows.model_shape import shape_of_model, shape_of_reference

if TYPE_CHECKING:
    from phasewise.cli.measured import Cost
    from phasewise.serving.model import PackedModel

TRACE_REQUESTS = 64
"""Drawn from a longer trace."""

IN_MEMORY = "sqlite://"


@dataclass(frozen=True)
class Wish:
    """What the command line asks for, checked as far as one option can be by itself."""

    model: str
    weight_format: WeightFormat
    phases: tuple[Phase, ...]
    objective: Objective
    budget_s: float
    evaluator: EvaluatorKind = "measured"
    machine_file: Path | None = None
    hidden_file: Path | None = None
    hints_file: Path | None = None
    requests: str | None = None
    """A trace file or a distribution; None: the built-in lengths."""
    cores: str | None = None
    ranks: int | None = None
    top_k: int = 10
    seed: int = 0
    db: str | None = None
    storage: str | None = None
    resume: bool = True


@dataclass(frozen=True)
class ExactRanks(OperatorLimits):
    """Plans of so many ranks and no others."""

    ranks: int = 1

    def reason(self, n_ranks: int) -> str | None:
        if n_ranks != self.ranks:
            return f"--ranks {self.ranks} leaves it out"
        return super().reason(n_ranks)


@dataclass(frozen=True)
class Subject:
    """What is tuned, and for which requests."""

    machine: Machine
    """As much of it as plans may use."""
    key: MachineKey
    """Of the whole machine: under what plans are kept and found again."""
    shape: ModelShape
    model_key: str
    limits: OperatorLimits
    """Of the model."""
    ranks: int | None
    """How many a plan must have; None: as many as is best."""
    hints: tuple[TopoTree, ...]
    """Groupings of the machine's tree that a probe suggests, the best first."""
    trace: Trace
    objective: Objective
    model: PackedModel | None = None
    """None: nothing is timed, so no weights were read."""

    def grid(self, phase: Phase) -> StepGrid:
        """The few steps that are timed for the whole trace."""
        return StepGrid.of(self.trace, self.objective, phase)

    def cost(self, phase: Phase) -> Cost:
        """The objective over the whole trace."""
        (whole,) = slice_costs(self.objective, phase, self.trace, 1)
        return whole

    @property
    def trace_digest(self) -> str:
        """Of the requests; part of a study's name."""
        lines = (f"{one.prompt_tokens} {one.output_tokens} {one.arrival_s}" for one in self.trace)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Searched:
    """The search of one phase, and how long it took."""

    phase: Phase
    outcome: SearchOutcome
    elapsed_s: float
    failures: Mapping[str, int]
    """How many configurations could not run for the same reason."""


def open_subject(wish: Wish) -> Subject:
    """Read the machine, the model and the requests. One clear line for whatever does not fit together."""
    whole = _machine(wish)
    machine = _restricted(whole, wish.cores)
    measured = wish.evaluator == "measured"
    model = _load(wish) if measured else None
    shape = shape_of_model(model) if model else shape_of_reference(wish.model, wish.weight_format, note)
    limits = OperatorLimits(shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn)
    if wish.ranks is not None:
        _check_ranks(wish.ranks, limits, shape, machine)
    name = model_key(shape.name, model.format if model else wish.weight_format.value)
    return Subject(
        machine=machine,
        key=machine_key(whole),
        shape=shape,
        model_key=name,
        limits=limits,
        ranks=wish.ranks,
        hints=_hints(wish.hints_file, machine),
        trace=_requests(wish, model),
        objective=wish.objective,
        model=model,
    )


def _load(wish: Wish) -> PackedModel:
    from phasewise.serving.loaders import load_model

    return load_model(wish.model, wish.weight_format.value, report=note)


def _machine(wish: Wish) -> Machine:
    if wish.machine_file is None:
        return read_machine()
    described = read_lstopo(wish.machine_file)
    if wish.evaluator == "measured":
        here = read_machine()
        if machine_key(described) != machine_key(here):
            raise EvaluationError(
                f"{wish.machine_file} describes another machine ({_kind_of(described)}) than this one "
                f"({_kind_of(here)}), which alone can be measured here: add --evaluator modelled"
            )
        return here
    return described


def _kind_of(machine: Machine) -> str:
    key = machine_key(machine)
    return f"{machine.cpu.name or 'a CPU without a name'}, {key.placement_sig}"


def _restricted(machine: Machine, cores: str | None) -> Machine:
    """The machine with no more than these PUs to use."""
    if cores is None:
        return machine
    chosen = set(parse_cores(cores))
    foreign = sorted(chosen.difference(machine.allowed_pus))
    if foreign:
        raise PlanError(
            f"--cores {cores}: {list_cores(foreign)} may not be used here, "
            f"only {list_cores(machine.allowed_pus)}"
        )
    return replace(machine, allowed_pus=tuple(pu for pu in machine.allowed_pus if pu in chosen))


def _check_ranks(ranks: int, limits: OperatorLimits, shape: ModelShape, machine: Machine) -> None:
    if reason := limits.reason(ranks):
        raise PlanError(f"--ranks {ranks}: {shape.name} cannot be divided so: {reason}")
    if ranks > len(machine.allowed_pus):
        raise PlanError(f"--ranks {ranks}: there are only {len(machine.allowed_pus)} CPUs for them")


def _hints(probe_file: Path | None, machine: Machine) -> tuple[TopoTree, ...]:
    """ProbeError for a file that is no probe's, TopoTreeError for one of another machine."""
    if probe_file is None:
        return ()
    from phasewise.tuner.probe import read_groups

    tree = fundamental(machine).tree
    return tuple(hint.apply(tree) for hint in read_groups(probe_file))


def _requests(wish: Wish, model: PackedModel | None) -> Trace:
    """As many as stand for the trace, no longer than the model's context where its weights are here."""
    if wish.requests is None:
        found = default_trace(TRACE_REQUESTS, wish.seed)
    else:
        found = load_trace(wish.requests, TRACE_REQUESTS, wish.seed)
    return fitted(found, model.config.context_length) if model else found


def stored_plans(wish: Wish) -> tuple[Machine, Mapping[Phase, ServicePlan]]:
    """The machine asked for, and the plans of the wish's phases that the database has for it."""
    machine = _machine(wish)
    shape = shape_of_reference(wish.model, wish.weight_format, note)
    name = model_key(shape.name, wish.weight_format.value)
    plans = plans_for(wish.db, machine, name, None, note)
    return machine, {
        phase: plan for phase, plan in plans.items() if phase in wish.phases and plan.source == "database"
    }


# ---- searching ---------------------------------------------------------------------------------------------


def study_location(wish: Wish) -> Location:
    """Where trials are kept: what is only modelled is forgotten unless `--storage` says where."""
    if wish.storage is not None:
        return locate(wish.storage)
    return locate(wish.db if wish.evaluator == "measured" else IN_MEMORY)


def objective_words(objective: Objective) -> str:
    """What is made small, in a few words that name a study, e.g. `e2e, 4 sequences at once`."""
    slo = objective.slo
    bounds = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms} if slo else {}
    within = [f"{name} {bound:g} ms" for name, bound in bounds.items() if bound is not None]
    together = [f"{objective.concurrency} sequences at once"] if objective.concurrency > 1 else []
    return ", ".join([objective.kind, *within, *together])


def space_of(subject: Subject) -> Space:
    """The configurations to choose from."""
    limits = subject.limits
    if subject.ranks is not None:
        limits = ExactRanks(
            limits.n_heads, limits.n_kv_heads, limits.head_dim, limits.ffn, ranks=subject.ranks
        )
    return Space(fundamental(subject.machine).tree, limits, subject.hints)


def search(
    subject: Subject,
    phase: Phase,
    wish: Wish,
    evaluator: Evaluator,
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
    location = study_location(wish)
    outcome = run(
        space_of(subject),
        SearchTask(key, evaluator, slice_costs(subject.objective, phase, subject.trace)),
        location,
        SearchSettings(Rules(seed=wish.seed), wish.top_k, wish.resume),
        stop=lambda: time.monotonic() >= deadline_s,
        report=heard,
        others=None if location.url == MEMORY_URL else company(),
    )
    return Searched(phase, outcome, time.monotonic() - started_s, failures)


def _answers_digest(subject: Subject, wish: Wish) -> str:
    """Of what an evaluator's answers depend on besides machine, model and requests."""
    from phasewise.cython_kernels._native import kernel_abi

    hidden = wish.hidden_file.read_bytes() if wish.hidden_file else b""
    what = kernel_abi("gemm") if wish.evaluator == "measured" else f"{subject.shape} {subject.machine}"
    return hashlib.sha256(what.encode() + hidden).hexdigest()[:12]
