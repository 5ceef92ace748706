"""The process that tunes a served model's products in idle time, by `python -m` and this module's name.

The server stops it (SIGSTOP) as soon as a request comes and lets it go on (SIGCONT) in idle time; whatever
was being timed then is timed again. It has the lowest priority, and ends with the server's engine. Of each
weight it tunes only the arithmetic that the server computes by, so that what wins changes no bit.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from phasewise._version import __version__
from phasewise.cython_kernels._native import compute_paths, kernel_abi
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.records import MachineKey, Problem, Sample, Schedule
from phasewise.kerneldb.store import Store, open_store
from phasewise.serving.errors import ServingError
from phasewise.serving.processes.behind_others import end_with_parent
from phasewise.serving.ranks.rank_worker import FOR_THE_ENGINE
from phasewise.topology import Machine, read_machine
from phasewise.tuner.errors import TunerError
from phasewise.tuner.first_duels import FIRST_S
from phasewise.tuner.ledger import Ledger, Scope
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.measurement_lock import PAUSE_S, FileLock, MeasurementLock, user_lock
from phasewise.tuner.plans import Phase, ServicePlan, machine_key
from phasewise.tuner.search.space import Arithmetic
from phasewise.tuner.task_division import Task
from phasewise.tuner.timing import Duel
from phasewise.tuner.tuning_run import ScheduleEvaluator, Tools, settle_hints, tune
from phasewise.tuner.weights import dense_format, format_name
from phasewise.workflows.opening.open_model import OpenModel, Weights, open_under
from phasewise.workflows.report import Report
from phasewise.workflows.tune_kernels.hints import waiting_of, work_of
from phasewise.workflows.tune_kernels.rounds import OnFirstCore, Round, evaluator_on
from phasewise.workflows.tune_kernels.run import rounds_of_model

MODULE = "phasewise.workflows.tune_kernels.idle_process"

SLICE_S = 20.0
"""After each slice the server hears of new winners."""
LONGEST_SLICE_S = 320.0
"""A slice that is too short for anything is doubled up to this."""
BYTES_A_SECOND = 1e10
"""A guess: only the order of products and the shares of a slice follow from it."""
MOST_ROWS = 512
"""Most rows of a product: the engine computes no more at once."""

T = TypeVar("T")


@dataclass(frozen=True)
class IdleTask:
    """The model to tune, as the server opened it."""

    model: str
    weights: Weights
    plans: Mapping[Phase, ServicePlan]
    db: str | None
    parent_pid: int

    def to_json(self) -> str:
        plans = {phase: plan.to_json() for phase, plan in self.plans.items()}
        return json.dumps({**vars(self), "weights": asdict(self.weights), "plans": plans})

    @classmethod
    def from_json(cls, text: str) -> IdleTask:
        """The task that `to_json` of the same program wrote."""
        fields: dict[str, Any] = json.loads(text)
        plans = {phase: ServicePlan.from_json(plan) for phase, plan in fields["plans"].items()}
        return cls(**{**fields, "weights": Weights(**fields["weights"]), "plans": plans})


class Stops:
    """Counts how often this process went on after a stop."""

    def __init__(self) -> None:
        self._count = 0
        signal.signal(signal.SIGCONT, self._went_on)

    def count(self) -> int:
        return self._count

    def _went_on(self, *_: object) -> None:
        self._count += 1


@dataclass(frozen=True)
class UninterruptedEvaluator:
    """An evaluator of whole timings: one during which the process was stopped is repeated."""

    evaluator: ScheduleEvaluator
    stops: Callable[[], int]

    def prepare(self, problem: Problem, schedules: Sequence[Schedule]) -> None:
        self.evaluator.prepare(problem, schedules)

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        return self._undisturbed(lambda: self.evaluator.measure(problem, schedules))

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        return self._undisturbed(lambda: self.evaluator.duel(problem, incumbent, candidate))

    def _undisturbed(self, take: Callable[[], T]) -> T:
        while True:
            before, taken = self.stops(), take()
            if self.stops() == before:
                return taken


class YieldingLock(MeasurementLock):
    """Waits while another process of this user measures. It holds no lock: it may be stopped for long."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock

    @contextmanager
    def turn(self, seconds: float = 0.0) -> Iterator[bool]:
        while self._lock.holder() is not None:
            time.sleep(PAUSE_S)
        yield True


def of_its_arithmetic(tuning_round: Round, opened: OpenModel) -> Round:
    """The round with each weight in the arithmetic that the model is opened with, and in no other.

    A weight whose verdicts in the database are of another one is left out. What a rank of several computes is
    tuned in the default one alone (`kernel_rounds`), whatever its weight has: it is then not used.
    """
    if any(len(plan.ranks) > 1 for plan in opened.plans.values()):
        return tuning_round
    weights = {
        (format_name(weight), weight.n, weight.k): weight for weight in opened.model.products().values()
    }
    table = opened.schedules["prefill"]
    shapes, tasks = [], []
    for shape, task in zip(tuning_round.shapes, tuning_round.tasks, strict=True):
        weight = weights.get((shape.format, shape.n, shape.k))
        own = None if weight is None else _own_arithmetic(table, weight, task.group.arithmetics[0])
        if own is not None and own in task.group.arithmetics:
            shapes.append(shape)
            tasks.append(task.part(task.ms, own))
    return replace(tuning_round, shapes=tuple(shapes), tasks=tuple(tasks))


def _own_arithmetic(table: ScheduleTable, weight: PackedWeight, default: Arithmetic) -> Arithmetic | None:
    """None where what is tuned has another one."""
    path, k_parts = table.arithmetic(weight)
    own = Arithmetic(path or compute_paths(weight.kind, weight.group)[0], k_parts)
    tuned = table.arithmetic_of(("gemm", dense_format(weight), weight.n, weight.k)) or default
    return own if own == tuned else None


def tune_in_idle_time(
    rounds: Sequence[Round],
    machine: Machine,
    store: Store,
    stops: Callable[[], int],
    tell: Callable[[int], None],
    lock: MeasurementLock,
) -> None:
    """Fight over hints, then search, the costliest weights first, until all is tuned.

    tell: is given the number of products that run by another schedule than before.
    """
    for tuning_round in rounds:
        with _evaluator(tuning_round, machine, stops, lock) as evaluator:
            key = machine_key(machine, tuning_round.cores)
            _tune_round(
                tuning_round, machine, store, _Toolbox(tuning_round, key, evaluator, store, lock), tell
            )


@dataclass(frozen=True)
class _Toolbox:
    round: Round
    machine: MachineKey
    evaluator: ScheduleEvaluator
    store: Store
    lock: MeasurementLock

    def of(self, family: str) -> Tools:
        step_bytes = work_of(self.round)
        return Tools(
            self.evaluator,
            Ledger(self.store, Scope(self.machine, kernel_abi(family), __version__)),
            call_s=lambda problem: step_bytes(problem) / BYTES_A_SECOND,
            worth=lambda task: sum(step_bytes(task.problem(m)) for m in (task.ms[0], task.ms[-1])),
            lock=self.lock,
        )


def _tune_round(
    tuning_round: Round,
    machine: Machine,
    store: Store,
    tools: _Toolbox,
    tell: Callable[[int], None],
) -> None:
    for waiting in waiting_of([tuning_round], machine, store):
        promoted = settle_hints(waiting.hinted, tools.of(waiting.family), FIRST_S).promoted
        if promoted:
            tell(promoted)
    promotions = store.promoted_measurements(machine_key(machine, tuning_round.cores))
    in_use = {row.problem: row.sample.schedule for row in promotions}
    _tune_in_slices(tuning_round.tasks, tools.of("gemm"), in_use, tell)
    if tuning_round.attention:
        _tune_in_slices([tuning_round.attention], tools.of("attention"), in_use, tell)


def _tune_in_slices(
    tasks: Sequence[Task], tools: Tools, in_use: dict[Problem, Schedule], tell: Callable[[int], None]
) -> None:
    """in_use: schedules at the beginning."""
    seconds = SLICE_S
    while seconds <= LONGEST_SLICE_S:
        outcome = tune(tasks, tools, seconds)
        now = {gain.problem: gain.schedule for gain in outcome.gains}
        changed = sum(in_use.get(problem) != schedule for problem, schedule in now.items())
        if changed:
            tell(changed)
        in_use |= now
        if outcome.end != "budget":
            return
        seconds = SLICE_S if outcome.timed + outcome.duels else 2 * seconds


@contextmanager
def _evaluator(
    tuning_round: Round, machine: Machine, stops: Callable[[], int], lock: MeasurementLock
) -> Iterator[UninterruptedEvaluator]:
    with evaluator_on(tuning_round.cores, machine, lock, math.inf) as native:
        yield UninterruptedEvaluator(OnFirstCore(native, tuning_round.cores[0]), stops)


def run_task(task: IdleTask, stops: Callable[[], int], tell: Callable[[int], None], report: Report) -> None:
    """Tune the model until all is tuned."""
    machine = read_machine()
    opened = open_under(task.plans, task.model, task.weights, task.db, machine)
    rounds = [
        of_its_arithmetic(tuning_round, opened)
        for tuning_round in rounds_of_model(opened, machine, [*task.plans], MOST_ROWS)
    ]
    with open_store(task.db, report) as store:
        if store.writable:
            tune_in_idle_time(rounds, machine, store, stops, tell, YieldingLock(user_lock()))


def main() -> int:
    for number in FOR_THE_ENGINE:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    task = IdleTask.from_json(sys.stdin.read())
    if os.getppid() != task.parent_pid:
        return 0
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def tell(changed: int) -> None:
        os.write(sys.stdout.fileno(), f"{changed}\n".encode())

    def report(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    try:
        run_task(task, Stops().count, tell, report)
    except (TunerError, KernelDbError, ServingError, OSError) as error:
        report(f"tuning in idle time has ended: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
