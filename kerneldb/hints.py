"""Hints: schedules that won elsewhere, which are timed here before anything is believed of them.

Elsewhere is another build of the same kernels on this machine (a release ago, or by another compiler),
another machine of this kind, or the project's own figures in the package (`shipped`). A hint is never used
unseen: a duel here decides, and its verdict is what serving reads. A product that has a verdict of this build
has no hint, and neither has a schedule that this build timed here and did not promote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from phasewise.kerneldb.records import MachineKey, Measurement, Problem, Schedule

if TYPE_CHECKING:
    from phasewise.kerneldb.store import Store


class HintTrust(IntEnum):
    """The source of a hint, the most trusted first."""

    OTHER_BUILD = 0
    """Schedules in use here under another build of the kernels."""
    IMPORTED = 1
    SHIPPED = 2
    """Schedules in the package: read-only, and lowest in trust."""

    def describe(self) -> str:
        """The source in words, for people."""
        return ("of another build of the kernels", "imported", "of the package")[self]


@dataclass(frozen=True)
class Hint:
    """The timing of a schedule that was in use elsewhere, and its source."""

    measurement: Measurement
    trust: HintTrust

    @property
    def problem(self) -> Problem:
        return self.measurement.problem

    @property
    def schedule(self) -> Schedule:
        return self.measurement.sample.schedule


Hints: TypeAlias = Mapping[Problem, Hint]


def waiting_hints(
    store: Store, machine: MachineKey, kernel_abi: str, shipped: Iterable[Measurement] = ()
) -> Hints:
    """Find the hints for products of one build of a kernel family on one kind of machine. All hints for one
    weight have the arithmetic of the most trusted hint, since the weight's products must agree in it."""
    own = store.promoted_measurements(machine, verified=True)
    judged = {row.problem for row in own if row.kernel_abi == kernel_abi}
    sources = {
        HintTrust.OTHER_BUILD: own,
        HintTrust.IMPORTED: store.promoted_measurements(machine, verified=False),
        HintTrust.SHIPPED: [row for row in shipped if row.origin.machine == machine],
    }
    hints = [
        Hint(row, trust)
        for trust, rows in sources.items()
        for row in rows
        if row.problem not in judged and same_kernels(row.kernel_abi, kernel_abi)
    ]
    hints.sort(
        key=lambda hint: (
            hint.trust,
            hint.measurement.kernel_abi != kernel_abi,
            -hint.measurement.origin.created_at_ms,
        )
    )
    arithmetics: dict[object, tuple[str, int]] = {}
    best: dict[Problem, Hint] = {}
    for hint in hints:
        problem, schedule = hint.problem, hint.schedule
        weight = (problem.family, problem.format, problem.n, problem.k)
        own_way = (schedule.compute_path, schedule.k_parts)
        if arithmetics.setdefault(weight, own_way) == own_way:
            best.setdefault(problem, hint)

    def was_timed(hint: Hint) -> bool:
        rows = store.measurements(hint.problem, machine, kernel_abi)
        return any(row.origin.verified and row.sample.schedule == hint.schedule for row in rows)

    return {problem: hint for problem, hint in best.items() if not was_timed(hint)}


def same_kernels(kernel_abi: str, other: str) -> bool:
    """True for two builds of one family and instruction set, e.g. `gemm-avx2-5f1c9e2b7a04` and
    `gemm-avx2-0b7d21c6e9f3`."""
    return kernel_abi.rpartition("-")[0] == other.rpartition("-")[0]


def counts_told(hints: Iterable[Hint]) -> str:
    """Count hints by source, e.g. `12 of another build of the kernels, 3 imported`; empty for no hints."""
    counts = Counter(hint.trust for hint in hints)
    return ", ".join(f"{counts[trust]} {trust.describe()}" for trust in HintTrust if counts[trust])
