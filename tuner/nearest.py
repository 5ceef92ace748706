"""Schedules of the nearest kinds of cores, with which a search begins where this kind has none of its own
yet.

Distance is by what decides schedules: L1 and L2 sizes, vector width, clock, and the rate at which one core
reads weights. The first three are in a core's signature; clock and rate come from its measurements. Each
counts by the logarithm of its ratio, and a figure known on one side only by a fixed amount. Only rows of
other kinds, and imported rows of this kind, are used: a run's own rows change none of its questions, so it
can be resumed. A seed is one more schedule that a search times first; it comes into use by a duel, like any
other."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from phasewise.kerneldb.records import MachineKey, Measurement, Problem, Schedule
from phasewise.tuner.errors import TunerError
from phasewise.tuner.weights import blank_weight

if TYPE_CHECKING:
    from phasewise.tuner.lookup import Obstacle

MOST_SEEDS = 2
"""The most seeds of one product, each of another kind of machine, nearest first."""

UNKNOWN = math.log2(1.5)
_SIZE = re.compile(r"L(1d|2) ([0-9]+)([KM])")
_BITS = {"avx512f": 512, "avx2": 256, "asimd": 128, "neon": 128, "sve": 256}

Seeds = Callable[[Problem], Sequence[Schedule]]


@dataclass(frozen=True)
class CoreFacts:
    """The figures of one core that decide schedules; None: not known."""

    l1d_bytes: float | None = None
    l2_bytes: float | None = None
    vector_bits: float | None = None
    mhz: float | None = None
    bytes_per_ns: float | None = None
    """Bytes of weights that one core reads per nanosecond: the best rate per thread in products of one
    row."""


class MeasuredStore(Protocol):
    """The part of a store that `NearestSchedules` needs."""

    def machines(self) -> set[MachineKey]: ...

    def promoted_measurements(
        self, machine: MachineKey | None = None, *, verified: bool = True
    ) -> list[Measurement]: ...


def facts_of(core_sig: str, rows: Iterable[Measurement] = ()) -> CoreFacts:
    """The figures of a core by its signature, and by measurements on such a core."""
    sizes = {
        name: float(size) * (1024 if unit == "K" else 1 << 20) for name, size, unit in _SIZE.findall(core_sig)
    }
    bits = [width for word, width in _BITS.items() if re.search(rf"\b{word}\b", core_sig)]
    clocks, rates = [], []
    for row in rows:
        if (mhz := row.sample.conditions.get("mhz", 0.0)) > 0:
            clocks.append(mhz)
        if row.problem.m == 1 and (n_bytes := _weight_bytes(row.problem)):
            rates.append(n_bytes / row.sample.estimate_ns / row.sample.schedule.threads)
    return CoreFacts(
        sizes.get("1d"),
        sizes.get("2"),
        max(bits, default=None),
        statistics.median(clocks) if clocks else None,
        max(rates, default=None),
    )


def _weight_bytes(problem: Problem) -> int:
    try:
        return blank_weight(problem.format, problem.n, problem.k).nbytes
    except (TunerError, KeyError, ValueError):  # attention, whose operands are no weight
        return 0


def distance(facts: CoreFacts, other: CoreFacts) -> float:
    """The distance of two cores: 0 if all known figures are equal, 1 if one figure is twice the other's."""
    total = 0.0
    for fact in fields(CoreFacts):
        a, b = getattr(facts, fact.name), getattr(other, fact.name)
        if a and b:
            total += abs(math.log2(a / b))
        elif a or b:
            total += UNKNOWN
    return total


class NearestSchedules:
    """Seeds for products on `here`, from a database's other machines with as many threads."""

    def __init__(self, store: MeasuredStore, here: MachineKey, obstacle: Obstacle) -> None:
        self._obstacle = obstacle
        threads = here.placement_sig.partition(":")[0]
        candidates: list[tuple[float, MachineKey, Mapping[tuple[str, str, int], list[Measurement]]]] = []
        own_facts = facts_of(here.core_sig, store.promoted_measurements(here))
        for machine in store.machines():
            if machine.placement_sig.partition(":")[0] != threads:
                continue
            rows = store.promoted_measurements(machine, verified=False)
            if machine != here:
                rows += store.promoted_measurements(machine)
            if rows:
                far = distance(own_facts, facts_of(machine.core_sig, rows)) if machine != here else 0.0
                candidates.append((far, machine, _by_rows(rows)))
        self._nearest = sorted(candidates, key=lambda candidate: (candidate[0], repr(candidate[1])))

    def __call__(self, problem: Problem) -> Sequence[Schedule]:
        """The schedules in use on the nearest kinds of machine for this product's weight, else for the most
        similar weight."""
        seeds: list[Schedule] = []
        for _, _, rows in self._nearest:
            like = rows.get((problem.family, problem.format, problem.m), [])
            if like and len(seeds) < MOST_SEEDS:
                schedule = min(like, key=lambda row: _unlike(row.problem, problem)).sample.schedule
                if schedule not in seeds and self._obstacle(problem, schedule) is None:
                    seeds.append(schedule)
        return seeds


def _by_rows(rows: Sequence[Measurement]) -> dict[tuple[str, str, int], list[Measurement]]:
    by_rows: dict[tuple[str, str, int], list[Measurement]] = {}
    for row in rows:
        by_rows.setdefault((row.problem.family, row.problem.format, row.problem.m), []).append(row)
    return by_rows


def _unlike(problem: Problem, other: Problem) -> float:
    return abs(math.log2(problem.n / other.n)) + abs(math.log2(problem.k / other.k))
