"""The products of a model that are tuned on each set of cores, and one tuning run over them.

A round is one set of cores: prefill and decode share a round where their plans use the same cores.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phasewise._version import __version__
from phasewise._words import share_of_limit
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.records import MachineKey, Problem, Sample, Schedule, StorageDuel
from phasewise.kerneldb.store import Store
from phasewise.serving.ranks.open_ranks import ALL_LOGITS_ROWS
from phasewise.serving.ranks.rank_teams import weighed_team
from phasewise.topology import Machine
from phasewise.tuner.attention import attention_grid, attention_group, tune_attention
from phasewise.tuner.ledger import Ledger, Scope
from phasewise.tuner.machine_limits import Roofline, measure_roofline
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.native import NativeEvaluator, core_caches, group_of, obstacle
from phasewise.tuner.nearest import NearestSchedules
from phasewise.tuner.plans import Phase, list_cores, machine_key
from phasewise.tuner.search.group import m_grid
from phasewise.tuner.search.protocol import SearchOptions
from phasewise.tuner.task_division import Task
from phasewise.tuner.timing import Duel
from phasewise.tuner.tuning_run import Gain, ScheduleEvaluator, Tools, TuningOutcome, TuningProgress, tune
from phasewise.tuner.weights import cold_bytes, format_name
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.serving.models.packed_model import PackedModel


def _native_evaluator(cores: Sequence[int], total_bytes: int) -> NativeEvaluator:
    return NativeEvaluator(cores, total_bytes, weighed_team)


def _limits(cores: Sequence[int], formats: Iterable[str], total_bytes: int) -> Roofline:
    return measure_roofline(cores, formats, total_bytes)


@dataclass(frozen=True)
class TuningBench:
    """The clock of a tuning run, and the timers of kernels and of cores' limits."""

    clock: Callable[[], float] = time.monotonic
    evaluator: Callable[[Sequence[int], int], NativeEvaluator] = _native_evaluator
    limits: Callable[[Sequence[int], Iterable[str], int], Roofline] = _limits


HERE = TuningBench()


@dataclass(frozen=True)
class Tuning:
    """What runs of tuning share: the machine, the place of their timings, their lock and reports.

    progress: called with the state of a search. resume: stored timings are not repeated.
    """

    machine: Machine
    store: Store
    lock: MeasurementLock
    report: Report = silent
    progress: Callable[[TuningProgress], None] = lambda _: None
    resume: bool = True
    bench: TuningBench = HERE

    def key(self, tuning_round: Round) -> MachineKey:
        """The key under which a round's timings are kept."""
        return machine_key(self.machine, tuning_round.cores)


DECODE_ROWS = 64
"""Most sequences that decode together, hence most rows of its products."""

HEADS = ("lm_head", "embed")

LEAST_WORTH = 0.25

ATTENTION_SHARE = 0.05
"""Share of the budget for attention, which has few schedules."""


@dataclass(frozen=True)
class Shape:
    """A shape of weights for which products are tuned."""

    format: str
    n: int
    k: int
    uses: int
    """The number of times that a forward pass multiplies by a weight of this shape."""
    most_rows: int | None = None
    """Most rows of a product; None: as many as the phase has."""


@dataclass(frozen=True)
class Round:
    """The products that are tuned on one set of cores; both phases at once where they use the same ones."""

    phases: tuple[Phase, ...]
    cores: tuple[int, ...]
    shapes: tuple[Shape, ...]
    tasks: tuple[Task, ...]
    """One task for each shape."""
    attention: Task | None = None
    ranks: int = 1
    """Number of ranks of the plan; the cores are one rank's."""

    def describe(self) -> str:
        of = f" (a rank of {self.ranks})" if self.ranks > 1 else ""
        return f"{' and '.join(self.phases)} on cores {list_cores(self.cores)}{of}"

    def weight_bytes(self, problem: Problem) -> int:
        """Bytes of one weight, as it lies in memory."""
        group = self.task(problem).group
        return problem.n * problem.k * group.weight_bits // 8

    def task(self, problem: Problem) -> Task:
        return next(task for task in self.tasks if task.problem(problem.m) == problem)

    def worths(self, bound_s: Callable[[Problem], float]) -> list[float]:
        """Share of a step's time that each task's products take at their limits.

        The mean of steps of the fewest and of the most rows. None is below LEAST_WORTH of an equal share: a
        weight of little time may be far from its limit.
        """
        shares = [0.0] * len(self.tasks)
        for end in (min, max):
            problems = [task.problem(end(task.ms)) for task in self.tasks]
            times = [
                shape.uses * bound_s(problem) for shape, problem in zip(self.shapes, problems, strict=True)
            ]
            shares = [share + step_s / sum(times) / 2 for share, step_s in zip(shares, times, strict=True)]
        return [max(share, LEAST_WORTH / len(self.tasks)) for share in shares]

    def uses(self, problem: Problem) -> int:
        return self.shapes[self.tasks.index(self.task(problem))].uses


@dataclass(frozen=True)
class TunedRound:
    """A round that has ended, and the limits of its cores."""

    round: Round
    machine: MachineKey
    kernel_abi: str
    roofline: Roofline
    outcome: TuningOutcome
    attention: TuningOutcome | None = None
    storage: tuple[StorageDuel, ...] = ()
    """Duels between sparse and dense storage of a model's weights, of this run or an older one."""

    @property
    def is_interrupted(self) -> bool:
        ends = [outcome.end for outcome in (self.outcome, self.attention) if outcome]
        return "interrupted" in ends

    def arithmetic_s(self, problem: Problem) -> float:
        """The least seconds of a product's arithmetic in any format."""
        return 2 * problem.m * problem.n * problem.k / max(self.roofline.peak_flops.values())

    def roofline_share(self, gain: Gain) -> float | None:
        """Share of the roofline's speed that a tuned product reaches (`share_of_limit`); 1 is the limit."""
        bound_ns = bound_s(self.round, self.roofline, gain.problem) * 1e9
        return share_of_limit(bound_ns / (gain.tuned_ns * gain.pace))


def shapes_of(model: PackedModel) -> tuple[Shape, ...]:
    """The weights that a forward pass multiplies by, alike ones together, the costliest first.

    Logits are computed for the last token of a sequence alone, so that the head never has many rows.
    """
    head = next(name for name in HEADS if name in model.weights)
    counts = Counter(
        (format_name(weight), weight.n, weight.k, name == head)
        for name, weight in model.products().items()
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
    """One round for each set of cores that a phase runs on, decode's few rows among prefill's many.

    attention: KV format and dimensions of a model's query and KV heads; None: attention is not tuned.
    """
    rounds = []
    for own in dict.fromkeys(cores.values()):
        phases: tuple[Phase, ...] = tuple(phase for phase in cores if cores[phase] == own)
        rows = max_m if "prefill" in phases else min(max_m, DECODE_ROWS)
        heads: Task | None = None
        if attention is not None:
            group = attention_group(*attention, len(own), core_caches(machine, own))
            heads = Task(group, attention_grid(rows if "prefill" in phases else 1), tune_attention)
        rounds.append(Round(phases, own, tuple(shapes), tuple(_tasks(machine, own, shapes, rows)), heads))
    return rounds


def _tasks(machine: Machine, cores: tuple[int, ...], shapes: Sequence[Shape], rows: int) -> Iterator[Task]:
    caches = core_caches(machine, cores)
    for shape in shapes:
        group = group_of(shape.format, shape.n, shape.k, len(cores), caches)
        most_rows = rows if shape.most_rows is None else min(rows, shape.most_rows)
        yield Task(group, m_grid(most_rows, SearchOptions()))


def tune_round(tuning_round: Round, tuning: Tuning, budget_s: float) -> TunedRound:
    """Tune a round for at most `budget_s`, the measuring of its limits included."""
    machine, lock, clock = tuning.machine, tuning.lock, tuning.bench.clock
    deadline_s, formats = clock() + budget_s, (shape.format for shape in tuning_round.shapes)
    with lock.turn(budget_s):
        roofline = tuning.bench.limits(tuning_round.cores, formats, cold_bytes(machine))
    since_ms, key = 0 if tuning.resume else time.time_ns() // 1_000_000, tuning.key(tuning_round)
    attention: TuningOutcome | None = None
    with evaluator_on(tuning_round.cores, tuning, budget_s) as native:
        evaluator = OnFirstCore(native, tuning_round.cores[0])

        def tools(family: str, call_s: Callable[[Problem], float], **more: Any) -> Tools:
            ledger = Ledger(tuning.store, Scope(key, kernel_abi(family), __version__, since_ms))
            return Tools(
                evaluator, ledger, report=tuning.progress, call_s=call_s, clock=clock, lock=lock, **more
            )

        def least_s(problem: Problem) -> float:
            return bound_s(tuning_round, roofline, problem)

        worths = tuning_round.worths(least_s)
        of_products = tools(
            "gemm",
            least_s,
            worth=lambda task: worths[tuning_round.tasks.index(task)],
            seeds=NearestSchedules(tuning.store, key, obstacle),
        )
        share = 1 - ATTENTION_SHARE if tuning_round.attention else 1
        outcome = tune(tuning_round.tasks, of_products, share * (deadline_s - clock()))
        if tuning_round.attention and outcome.end != "interrupted":
            peak = max(roofline.peak_flops.values())  # each row reads the rows before it
            own = tools("attention", lambda problem: 4 * problem.n * problem.m**2 / peak)
            attention = tune([tuning_round.attention], own, deadline_s - clock())
    return TunedRound(tuning_round, key, kernel_abi("gemm"), roofline, outcome, attention)


@contextmanager
def evaluator_on(cores: Sequence[int], tuning: Tuning, seconds: float) -> Iterator[NativeEvaluator]:
    """An evaluator on the team that an engine has on these cores. It is opened in a turn of the lock, for
    which it waits `seconds` at most, since it measures cores of several kinds.
    """
    with tuning.lock.turn(seconds):
        native = tuning.bench.evaluator(cores, cold_bytes(tuning.machine))
    with closing(native):
        yield native


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Keep this thread on a core; afterwards it may run on all cores that it could run on before."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


class OnFirstCore:
    """An evaluator whose caller, the team's first thread, is on the team's first core while it times.

    Between timings the thread may run on any core. Otherwise all processes that tune for these cores would
    compute on the same one.
    """

    def __init__(self, evaluator: ScheduleEvaluator, core: int) -> None:
        self._evaluator = evaluator
        self._core = core
        self.prepare = evaluator.prepare

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        with _on_core(self._core):
            return self._evaluator.measure(problem, schedules)

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        with _on_core(self._core):
            return self._evaluator.duel(problem, incumbent, candidate)


def bound_s(tuning_round: Round, roofline: Roofline, problem: Problem) -> float:
    """The least seconds of a product on the round's cores."""
    bytes_read = tuning_round.weight_bytes(problem)
    return roofline.bound_ns(problem.format, problem.n, problem.k, problem.m, bytes_read) / 1e9
