"""A machine made of arithmetic, and a tuning run on it that a test can interrupt, kill, or start twice.

As a script: `python synthetic_machine.py DATABASE [SECONDS A MEASUREMENT [LOCK FILE]]` tunes, divided with
others that have the same lock file if there is one, and prints what is in use.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from phasewise.kerneldb.records import MachineKey, Problem, Sample, Schedule
from phasewise.kerneldb.store import open_store
from phasewise.tuner import timing
from phasewise.tuner.ledger import Ledger, Scope
from phasewise.tuner.search.group import Group
from phasewise.tuner.search.protocol import SearchOptions
from phasewise.tuner.search.space import Arithmetic, Caches, MicroKernel
from phasewise.tuner.task_division import Task
from phasewise.tuner.timing import Duel
from phasewise.tuner.tuning_run import Tools, TuningOutcome, tune

MACHINE = MachineKey("AuthenticAMD 26/2 avx2+avx512f L1d 48K L2 1M", "2 threads: 1 node x 1 L3 x 2 cores")
SCOPE = Scope(MACHINE, "gemm-portable-1", "0.1.0")
KERNELS = tuple(MicroKernel(mr, panels) for mr in (1, 2, 4, 8) for panels in (1, 2))
MS = (1, 2, 4, 8)
OPTIONS = SearchOptions(window=4, kept_kernels=2)
PLAIN = Arithmetic("fma")
OTHER = Arithmetic("bf16_dot")

Cost = Callable[[Problem, Schedule], int]


def plain_cost(problem: Problem, schedule: Schedule) -> int:
    """Least for the tallest kernel that fits, two panels, short blocks and threads on columns."""
    rows = -(-problem.m // schedule.mr) * schedule.mr
    cost = 1000 * rows / min(8, schedule.mr) * (1.0 if schedule.panels == 2 else 1.25)
    cost *= 1 + abs(schedule.block_n - 64) / 4096 + abs(schedule.block_k - 128) / 8192
    cost *= 1.3 if schedule.threads_m > 1 else 1.0
    return round(100_000 + cost * problem.n / 16)


def default_of(m: int) -> Schedule:
    """One row and one panel at a time: easily beaten."""
    return Schedule(1, 1, m, 128, 256, 1, 2, 1, PLAIN.compute_path, PLAIN.k_parts, 2048, "nm")


def task_of(n: int = 256, ms: tuple[int, ...] = MS, arithmetics: tuple[Arithmetic, ...] = (PLAIN,)) -> Task:
    group = Group(
        format="f32",
        n=n,
        k=256,
        threads=2,
        arithmetics=arithmetics,
        kernels={arithmetic.compute_path: KERNELS for arithmetic in arithmetics},
        caches=Caches(48 << 10, 1 << 20),
        weight_bits=32,
        default=default_of,
    )
    return Task(group, ms)


@dataclass
class SyntheticMachine:
    """Costs by a formula, a clock that they move, and something that happens around a measurement."""

    cost: Cost = plain_cost
    happens: Callable[[], None] = lambda: None
    now_s: float = 0.0
    timed: list[tuple[Problem, Schedule]] = field(default_factory=list)
    duels: list[tuple[Problem, Schedule, Schedule]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def prepare(self, problem: Problem, schedules: Sequence[Schedule]) -> None:
        pass

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        self.happens()
        self.timed += [(problem, schedule) for schedule in schedules]
        samples = [self._sample(problem, schedule) for schedule in schedules]
        self.happens()
        return samples

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        self.happens()
        self.duels.append((problem, incumbent, candidate))
        old, new = self._sample(problem, incumbent), self._sample(problem, candidate)
        taken = [(old.samples_ns, new.samples_ns)] * timing.PAIRS
        return Duel(timing.compare(taken), old, new)

    def _sample(self, problem: Problem, schedule: Schedule) -> Sample:
        cost_ns = self.cost(problem, schedule)
        self.now_s += 5 * cost_ns / 1e9
        return Sample(schedule, (cost_ns,), cost_ns, None, 5 * cost_ns, {"steal": 0.0, "others": 0.0})


def run_on(
    machine: SyntheticMachine,
    database: str,
    tasks: Sequence[Task] = (task_of(), task_of(512)),
    budget_s: float = 1e9,
    since_ms: int = 0,
    scope: Scope = SCOPE,
    **tools: Any,
) -> TuningOutcome:
    """tools: fields of `Tools`."""
    with open_store(database) as store:
        ledger = Ledger(store, replace(scope, since_ms=since_ms))
        return tune(tasks, Tools(machine, ledger, OPTIONS, **{"clock": machine.clock, **tools}), budget_s)


def in_use(outcome: TuningOutcome) -> list[tuple[int, int, dict[str, object]]]:
    """The schedules that a run leaves behind, each after its weight's n and m."""
    return [(gain.problem.n, gain.problem.m, asdict(gain.schedule)) for gain in outcome.gains]


if __name__ == "__main__":
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    outcome = run_on(SyntheticMachine(happens=lambda: time.sleep(pause_s)), sys.argv[1])
    print(json.dumps({"end": outcome.end, "timed": outcome.timed, "in_use": in_use(outcome)}))
