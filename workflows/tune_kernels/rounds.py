"""`phasewise tune-kernels` between its options and its tables: which products, on which cores, what limit."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise._version import __version__
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.records import MachineKey, Problem
from phasewise.kerneldb.store import Store
from phasewise.serving.rank_teams import keeping_affinity
from phasewise.serving.ranks import ALL_LOGITS_ROWS
from phasewise.topology import Machine
from phasewise.tuner.attention import attention_group
from phasewise.tuner.ledger import Ledger, Scope
from phasewise.tuner.native import NativeEvaluator, core_caches, group_of
from phasewise.tuner.plans import Phase, machine_key
from phasewise.tuner.roofline import Roofline, measure_roofline
from phasewise.tuner.search.attention import attention_grid, tune_attention
from phasewise.tuner.search.group import m_grid
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.task_division import Company, Nobody, Task
from phasewise.tuner.tuning_run import Gain, Tools, TuningOutcome, TuningProgress, tune
from phasewise.tuner.weights import cold_bytes, format_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.serving.model import PackedModel


DECODE_ROWS = 64
"""Most sequences that decode together, hence most rows of its products."""

HEADS = ("lm_head", "embed")

ATTENTION_SHARE = 0.05
"""Of the budget: it has few schedules."""


@dataclass(frozen=True)
class Shape:
    """A weight to tune products for."""

    format: str
    n: int
    k: int
    uses: int
    """How often a forward pass multiplies by a weight of this shape."""
    most_rows: int | None = None
    """None: as many as the phase has."""


@dataclass(frozen=True)
class Round:
    """What is tuned on one set of cores; both phases at once where they use the same ones."""

    phases: tuple[Phase, ...]
    cores: tuple[int, ...]
    shapes: tuple[Shape, ...]
    tasks: tuple[Task, ...]
    """One for each shape."""
    attention: Task | None = None

    def weight_bytes(self, problem: Problem) -> int:
        """Of one weight, as it lies in memory."""
        group = self.task(problem).group
        return problem.n * problem.k * group.weight_bits // 8

    def task(self, problem: Problem) -> Task:
        return next(task for task in self.tasks if task.problem(problem.m) == problem)

    def uses(self, problem: Problem) -> int:
        return self.shapes[self.tasks.index(self.task(problem))].uses


@dataclass(frozen=True)
class Tuned:
    """A round that has ended, and the limits of its cores."""

    round: Round
    machine: MachineKey
    kernel_abi: str
    roofline: Roofline
    outcome: TuningOutcome
    attention: TuningOutcome | None = None

    @property
    def is_interrupted(self) -> bool:
        ends = [outcome.end for outcome in (self.outcome, self.attention) if outcome]
        return "interrupted" in ends

    def roofline_share(self, gain: Gain) -> float:
        """Of what the cores could do at best; 1 is the limit."""
        return bound_s(self.round, self.roofline, gain.problem) * 1e9 / gain.tuned_ns


def shapes_of(model: PackedModel) -> tuple[Shape, ...]:
    """The weights that a forward pass multiplies by, alike ones together, the costliest first.

    Logits are computed for the last token of a sequence alone, so that the head never has many rows.
    """
    head = next(name for name in HEADS if name in model.weights)
    counts = Counter(
        (format_name(weight), weight.n, weight.k, name == head)
        for name, weight in model.weights.items()
        if name == head or name not in HEADS
    )
    shapes = [Shape(*key[:3], uses, ALL_LOGITS_ROWS if key[3] else None) for key, uses in counts.items()]
    return tuple(
        sorted(shapes, key=lambda shape: (shape.most_rows is not None, -shape.n * shape.k * shape.uses))
    )


def plan_rounds(
    machine: Machine,
    cores: Mapping[Phase, tuple[int, ...]],
    shapes: Sequence[Shape],
    max_m: int,
    attention: tuple[str, int, int] | None = None,
) -> list[Round]:
    """One for each set of cores that a phase runs on, decode's few rows among prefill's many.

    attention: KV format and dimensions of a model's query and KV heads; None: it is not tuned.
    """
    rounds = []
    for own in dict.fromkeys(cores.values()):
        phases = tuple(phase for phase in cores if cores[phase] == own)
        rows = max_m if "prefill" in phases else min(max_m, DECODE_ROWS)
        heads = attention and _attention_task(machine, own, attention, rows if "prefill" in phases else 1)
        rounds.append(Round(phases, own, tuple(shapes), tuple(_tasks(machine, own, shapes, rows)), heads))
    return rounds


def _attention_task(
    machine: Machine, cores: tuple[int, ...], attention: tuple[str, int, int], rows: int
) -> Task:
    group = attention_group(*attention, len(cores), core_caches(machine, cores))
    return Task(group, attention_grid(rows), tune_attention)


def _tasks(machine: Machine, cores: tuple[int, ...], shapes: Sequence[Shape], rows: int) -> Iterator[Task]:
    caches = core_caches(machine, cores)
    for shape in shapes:
        group = group_of(shape.format, shape.n, shape.k, len(cores), caches)
        most_rows = rows if shape.most_rows is None else min(rows, shape.most_rows)
        yield Task(group, m_grid(most_rows, SearchOptions()))


@keeping_affinity()
def tune_round(
    one: Round,
    machine: Machine,
    store: Store,
    budget_s: float,
    resume: bool,
    report: Callable[[TuningProgress], None],
    company: Company | None = None,
) -> Tuned:
    """Tune a round for at most `budget_s`, the measuring of its limits included; None: nobody else does."""
    started_s = time.monotonic()
    company = _Pinned(company or Nobody(), one.cores)
    total_bytes = cold_bytes(machine)
    with company.turn():
        roofline = measure_roofline(one.cores, (shape.format for shape in one.shapes), total_bytes)
    since_ms = 0 if resume else time.time_ns() // 1_000_000
    key, deadline_s = machine_key(machine, one.cores), started_s + budget_s
    scope = Scope(key, kernel_abi("gemm"), __version__, since_ms)
    attention: TuningOutcome | None = None
    evaluator = NativeEvaluator(one.cores, total_bytes)
    try:
        tools = Tools(
            evaluator,
            Ledger(store, scope),
            report=report,
            call_s=lambda problem: bound_s(one, roofline, problem),
            company=company,
        )
        left_s = deadline_s - time.monotonic()
        outcome = tune(one.tasks, tools, left_s * (1 - ATTENTION_SHARE) if one.attention else left_s)
        if one.attention and outcome.end != "interrupted":
            own = Scope(key, kernel_abi("attention"), __version__, since_ms)
            tools = Tools(evaluator, Ledger(store, own), report=report, company=company)
            attention = tune([one.attention], tools, deadline_s - time.monotonic())
    finally:
        evaluator.close()
    return Tuned(one, scope.machine, scope.kernel_abi, roofline, outcome, attention)


class _Pinned:
    """Company, for a thread that a team keeps on its first core; between turns it may work on any.

    Else all processes that tune for these cores would work on the same one.
    """

    def __init__(self, company: Company, cores: Sequence[int]) -> None:
        self._company = company
        self._first_core = cores[0]
        self._everywhere = os.sched_getaffinity(0)
        self.let_pass, self.claim, self.wait_for = company.let_pass, company.claim, company.wait_for

    @contextmanager
    def turn(self) -> Iterator[bool]:
        with self._company.turn() as is_alone:
            os.sched_setaffinity(0, {self._first_core})
            try:
                yield is_alone
            finally:
                os.sched_setaffinity(0, self._everywhere)


def bound_s(one: Round, roofline: Roofline, problem: Problem) -> float:
    """The least time of a product on the round's cores."""
    bytes_read = one.weight_bytes(problem)
    return roofline.bound_ns(problem.format, problem.n, problem.k, problem.m, bytes_read) / 1e9
