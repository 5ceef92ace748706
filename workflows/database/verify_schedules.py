"""Verify imported schedules: time them on this machine's cores and promote those that a duel confirms."""

from __future__ import annotations

import time
from collections.abc import Iterator

from phasewise._version import __version__
from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.upkeep import Here, ScheduleVerdict, verify
from phasewise.topology import Machine
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.native import NativeEvaluator, obstacle
from phasewise.tuner.plans import PHASES, default_plan, machine_key
from phasewise.tuner.weights import cold_bytes
from phasewise.workflows.report import Report, silent

FAMILIES = ("gemm", "attention")
"""The kernel families that the evaluator times."""


class NativeBench(NativeEvaluator):
    """The tuner's evaluator; it also names the reason why it refuses to time a row."""

    def obstacle(self, problem: Problem, schedule: Schedule) -> str | None:
        """See `kerneldb.upkeep.Bench`."""
        return obstacle(problem, schedule)


def verdicts(
    store: Store,
    machine: Machine,
    budget_s: float,
    threads: int | None,
    lock: MeasurementLock,
    report: Report = silent,
) -> Iterator[ScheduleVerdict]:
    """Verify the best imported schedules of each problem for at most `budget_s`, one verdict for each.

    They are timed, with the machine to this process, on the cores of each phase's default plan, which is
    where imported rows were measured.
    """
    deadline_s = time.monotonic() + budget_s
    until_ms = time.time_ns() / 1_000_000 + 1000 * budget_s
    plans = [default_plan(machine, phase, threads) for phase in PHASES]
    for cores in dict.fromkeys(plan.ranks[0].cores for plan in plans):
        abis = {family: _native.kernel_abi(family) for family in FAMILIES}
        here = Here(machine_key(machine, cores), abis, __version__, until_ms=until_ms)
        bench = NativeBench(cores, cold_bytes(machine))
        try:
            with lock.turn(deadline_s - time.monotonic()):
                yield from verify(store, here, bench, report)
        finally:
            bench.close()
