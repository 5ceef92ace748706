"""Rows of this machine in a tuning database: schedules that were timed, and schedules in use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.records import (
    Comparison,
    MachineKey,
    Measurement,
    Origin,
    Problem,
    Promotion,
    Sample,
    Schedule,
)
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.plans import default_plan, machine_key

WON = Comparison(1.5, 1.25, 2.0, 0.95, 40)


def here(threads: int | None = None) -> MachineKey:
    """This machine with the cores on which it decodes by default."""
    machine = read_machine()
    return machine_key(machine, default_plan(machine, "decode", threads).cores)


def timed(
    problem: Problem,
    schedule: Schedule,
    estimate_ns: int = 900,
    abi: str = "",
    machine: MachineKey | None = None,
    verified: bool = True,
) -> Measurement:
    """One timing; abi: of the build that runs, where it is left out. machine: `here()`, likewise."""
    origin = Origin(machine or here(), "0.1.0", 1_795_000_000_000, verified)
    sample = Sample(schedule, (estimate_ns,), estimate_ns, None, 1000)
    return Measurement(problem, sample, abi or kernel_abi(problem.family), origin)


def in_use(row: Measurement) -> Promotion:
    """The promotion of a row's schedule."""
    return Promotion(row.problem, row.sample.schedule, None, WON, row.kernel_abi, row.origin)


def keep_in_use(db: Path | str, rows: Sequence[Measurement]) -> None:
    """The rows and the promotions of their schedules."""
    with open_store(db) as store:
        for row in rows:
            store.add([row, in_use(row)])
