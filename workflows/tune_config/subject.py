"""The subject of a run of `tune-config` (machine, model, requests, objective) and its search of a phase."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phasewise._files import read_input
from phasewise._words import counted, number
from phasewise.kerneldb.location import Location, locate
from phasewise.kerneldb.records import MachineKey
from phasewise.topology import Machine, read_lstopo, read_machine
from phasewise.tuner.config.simulate import Objective, StepGrid
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.steps import ModelShape, StepEvaluator
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
from phasewise.tuner.config.walk import BAND_RULES, Rules
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import (
    Phase,
    ServicePlan,
    list_cores,
    machine_key,
    model_key,
    nodes_of,
    parse_cores,
    plans_for,
)
from phasewise.tuner.topotree import OperatorLimits, UnevenCores, fundamental
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.model_shape import lone_config, shape_of_model, shape_of_reference
from phasewise.workflows.opening.open_model import suited_default
from phasewise.workflows.report import Report, silent
from phasewise.workflows.tune_config.settings import TuneConfigSettings

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.workflows.tune_config.measured_evaluator import Cost

TRACE_REQUESTS = 64
"""Number of requests that are drawn from a longer trace."""

IN_MEMORY = "sqlite://"


@dataclass(frozen=True)
class Subject:
    """The model and machine that are tuned, and the requests for which."""

    machine: Machine
    """The part of the machine that plans may use."""
    key: MachineKey
    """Key of the whole machine, under which plans are kept and found again."""
    shape: ModelShape
    model_key: str
    limits: OperatorLimits
    """Limits of the model's operators."""
    ranks: int | None
    """Number of ranks that a plan must have; None: the best number."""
    trace: Trace
    objective: Objective
    model: PackedModel | None = None
    """The model with its weights; None: nothing is timed, so no weights were read."""
    slow: tuple[int, ...] = ()
    """PUs that were measured slower than others of their kind, the slowest first."""
    below: ServicePlan | None = None
    """Decode's plan for fewer sequences, for which the run seeks a band; None: the run seeks a whole plan."""
    objectives_below: Mapping[str, float] = field(default_factory=dict)
    """The figures of `below` when it was measured."""
    whole: Machine | None = None
    """The machine with all that this process may use, which names a plan's places; None: `machine`."""

    @property
    def kept_on(self) -> Machine:
        """The machine whose places plans name."""
        return self.whole or self.machine

    def grid(self, phase: Phase) -> StepGrid:
        """The grid of the few steps that are timed for the whole trace."""
        return StepGrid.of(self.trace, self.objective, phase)

    def cost(self, phase: Phase) -> Cost:
        """The objective of a phase over the whole trace."""
        (whole,) = slice_costs(self.objective, phase, self.trace, 1)
        return whole

    @property
    def trace_digest(self) -> str:
        """Digest of the requests; part of a study's name."""
        lines = (
            f"{request.prompt_tokens} {request.output_tokens} {request.arrival_s}" for request in self.trace
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def check_weights(wish: TuneConfigSettings) -> None:
    """Raise UsageError where steps would be timed of a model that has no weights."""
    if wish.evaluator == "measured" and lone_config(wish.model) is not None:
        raise UsageError(
            f"{wish.model} has no weights to time: add --evaluator modelled, or name a model with weights"
        )


def open_subject(wish: TuneConfigSettings, report: Report = silent) -> Subject:
    """Read the machine, the model and the requests.

    Raises PlanError, EvaluationError, TraceError or ModelError where they cannot be read or do not fit
    together.
    """
    from phasewise.serving.loaders import load_model

    check_weights(wish)
    whole = _machine(wish)
    machine = _restricted(whole, wish.cores)
    measured = wish.evaluator == "measured"
    model = load_model(wish.model, wish.weight_format, report=report) if measured else None
    shape = shape_of_model(model) if model else shape_of_reference(wish.model, wish.weight_format, report)
    limits = OperatorLimits(shape.n_heads, shape.divided_heads, shape.head_dim, shape.ffn)
    if wish.ranks is not None:
        _check_ranks(wish.ranks, limits, shape, machine)
    name = model_key(shape.name, model.format if model else wish.weight_format)
    return Subject(
        machine=machine,
        key=machine_key(whole),
        shape=shape,
        model_key=name,
        limits=limits,
        ranks=wish.ranks,
        trace=_requests(wish, model),
        objective=wish.goal,
        model=model,
        slow=_slow(machine, report) if measured else (),
        whole=whole,
    )


def _slow(machine: Machine, report: Report) -> tuple[int, ...]:
    from phasewise.tuner.core_shares import slow_pus

    slow = slow_pus(machine)
    if slow:
        report(f"slower than their likes: CPUs {list_cores(sorted(slow))}; plans without them are tried too")
    return slow


def _machine(wish: TuneConfigSettings) -> Machine:
    if wish.machine is None:
        return read_machine()
    described = read_lstopo(wish.machine)
    if wish.evaluator == "measured":
        here = read_machine()
        if machine_key(described) != machine_key(here):
            raise EvaluationError(
                f"{wish.machine} describes another machine ({_kind_of(described)}) than this one "
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
        raise UsageError(
            f"--cores {cores}: {list_cores(foreign)} may not be used here, "
            f"only {list_cores(machine.allowed_pus)}"
        )
    return replace(machine, allowed_pus=tuple(pu for pu in machine.allowed_pus if pu in chosen))


def _check_ranks(ranks: int, limits: OperatorLimits, shape: ModelShape, machine: Machine) -> None:
    if reason := limits.reason(ranks):
        raise UsageError(f"--ranks {ranks}: {shape.name} cannot be divided so: {reason}")
    if ranks > len(machine.allowed_pus):
        raise UsageError(f"--ranks {ranks}: {counted(len(machine.allowed_pus), 'CPU')} for them")


def _requests(wish: TuneConfigSettings, model: PackedModel | None) -> Trace:
    """At most TRACE_REQUESTS requests, cut to the model's context where the model is given."""
    if wish.requests is None:
        trace = default_trace(TRACE_REQUESTS, wish.seed)
    else:
        trace = load_trace(wish.requests, TRACE_REQUESTS, wish.seed)
    return fitted(trace, model.config.context_length) if model else trace


def stored_plans(
    wish: TuneConfigSettings, report: Report = silent
) -> tuple[Machine, Mapping[Phase, ServicePlan]]:
    """The machine asked for, and the plans of the wish's phases there: stored ones, else the default ones."""
    machine = _machine(wish)
    shape = shape_of_reference(wish.model, wish.weight_format, report)
    name = model_key(shape.name, wish.weight_format)
    default = suited_default(wish.model, wish.weight_format, report)
    plans = plans_for(wish.db, machine, name, None, report, default=default)
    return machine, {phase: plan for phase, plan in plans.items() if phase in wish.phases}


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
    """Numbers of configurations that could not run, by reason."""


def study_location(wish: TuneConfigSettings) -> Location:
    """The database of a study's trials; a modelled machine's are kept only where `--storage` names one."""
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
    """The configurations among which a search chooses."""
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
    """Search a phase's configurations until the deadline (`time.monotonic`) or until all are evaluated."""
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
