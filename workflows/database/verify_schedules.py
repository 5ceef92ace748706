"""Verify imported schedules: time them on this machine's cores and promote those that a duel confirms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from phasewise._version import __version__
from phasewise._words import proven
from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Origin, Problem, Schedule, StorageDuel
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.upkeep import Here, ScheduleVerdict, verify
from phasewise.topology import Machine
from phasewise.tuner.errors import TunerError
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.native import NativeEvaluator, obstacle
from phasewise.tuner.plans import PHASES, default_plan, machine_key
from phasewise.tuner.search.space import arithmetic_of
from phasewise.tuner.timing import Duel
from phasewise.tuner.weights import cold_bytes, split_format
from phasewise.workflows.report import Report, silent

FAMILIES = ("gemm", "attention")
"""The kernel families that the evaluator times."""


class NativeBench(NativeEvaluator):
    """The tuner's evaluator; it also names the reason why it refuses to time a row."""

    def obstacle(self, problem: Problem, schedule: Schedule) -> str | None:
        """See `kerneldb.upkeep.Bench`."""
        return obstacle(problem, schedule)


class StorageBench(Protocol):
    """The bench of duels between storages: `NativeBench`."""

    def obstacle(self, problem: Problem, schedule: Schedule) -> str | None: ...

    def duel_storages(self, problem: Problem, schedule: Schedule, dense_schedule: Schedule) -> Duel: ...


def verify_storage_duels(
    store: Store, here: Here, bench: StorageBench, report: Report
) -> Iterator[StorageDuel]:
    """Fight imported duels between storages again that no duel of this database has settled, and keep them.

    Problems that cannot be timed here are reported.
    """
    abi = here.kernel_abis["gemm"]
    duels = store.rows(StorageDuel, machine=here.machine, kernel_abi=abi)
    settled = {duel.problem for duel in duels if duel.origin.verified}
    imported = {duel.problem: duel for duel in duels if duel.problem not in settled}
    for problem, duel in imported.items():
        if obstacle := _storage_obstacle(duel, bench):
            report(f"{problem.describe()}: storages are not compared: {obstacle}")
            continue
        if here.now_ms() >= here.until_ms:
            return
        fought = bench.duel_storages(problem, duel.schedule, duel.dense_schedule)
        origin = Origin(here.machine, here.program_version, here.now_ms())
        again = replace(duel, comparison=fought.comparison, origin=origin)
        store.add([again])
        yield again


def _storage_obstacle(duel: StorageDuel, bench: StorageBench) -> str | None:
    problem = duel.problem
    try:
        dense, density = split_format(problem.format)
    except TunerError as error:
        return str(error)
    if problem.family != "gemm" or density is None:
        return "its format names no sparse storage"
    if arithmetic_of(duel.schedule) != arithmetic_of(duel.dense_schedule):
        return "its schedules differ in their arithmetic"
    of_dense = replace(problem, format=dense)
    return bench.obstacle(of_dense, duel.dense_schedule) or bench.obstacle(problem, duel.schedule)


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
                for duel in verify_storage_duels(store, here, bench, report):
                    comparison = duel.comparison
                    low, high = comparison.gain_low, comparison.gain_high
                    ratio = f"{proven(comparison.gain, low, high, 3)} ({low:.3f} to {high:.3f})"
                    report(f"{duel.problem.describe()}: speed over dense: {ratio}")
        finally:
            bench.close()
