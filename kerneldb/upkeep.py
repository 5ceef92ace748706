"""Database maintenance: preferred timings, diff, clean-up, verification.

Of every key (problem, kind of machine, build) one timing is preferred: of the schedule in use, else the
fastest one measured here, else what was in use where the rows came from, else the fastest one there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from typing import Protocol

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
from phasewise.kerneldb.store import Report, Store


class PreferenceReason(StrEnum):
    """Why a timing is the preferred one of its key."""

    IN_USE = "in use"
    MEASURED = "measured"
    IMPORTED = "imported"


@dataclass(frozen=True)
class Key:
    """The columns that timings must share to be compared."""

    problem: Problem
    machine: MachineKey
    kernel_abi: str


@dataclass(frozen=True)
class Preferred:
    """The timing that speaks for its key."""

    measurement: Measurement
    standing: PreferenceReason

    @property
    def key(self) -> Key:
        """The key of the timing."""
        row = self.measurement
        return Key(row.problem, row.origin.machine, row.kernel_abi)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the timing."""
        return self.measurement.sample.schedule


def preferred(store: Store) -> dict[Key, Preferred]:
    """One timing a key, in the order of problems."""
    sources = (
        (PreferenceReason.IMPORTED, store.best_measurements(verified=False)),
        (PreferenceReason.IMPORTED, store.promoted_measurements(verified=False)),
        (PreferenceReason.MEASURED, store.best_measurements()),
        (PreferenceReason.IN_USE, store.promoted_measurements()),
    )
    found = (Preferred(row, standing) for standing, rows in sources for row in rows)
    last = {one.key: one for one in found}
    return dict(sorted(last.items(), key=lambda item: _order_of(item[0])))


def _order_of(key: Key) -> tuple[object, ...]:
    return (*astuple(key.problem), *astuple(key.machine), key.kernel_abi)


@dataclass(frozen=True)
class Difference:
    """A key whose preferred schedules differ; None on the side that knows nothing of it."""

    key: Key
    here: Preferred | None
    there: Preferred | None


@dataclass(frozen=True)
class Diff:
    """The differences between the preferred timings of two databases."""

    same: int
    differences: tuple[Difference, ...]


def diff(here: Store, there: Store) -> Diff:
    """Compare by key. How a row came to be trusted makes no difference; another schedule does."""
    mine, theirs = preferred(here), preferred(there)
    differences = tuple(
        Difference(key, mine.get(key), theirs.get(key))
        for key in sorted({*mine, *theirs}, key=_order_of)
        if key not in mine or key not in theirs or mine[key].schedule != theirs[key].schedule
    )
    return Diff(len({*mine, *theirs}) - len(differences), differences)


def is_stale(kernel_abi: str, current: Collection[str]) -> bool:
    """True if this program has another build of the same kernels; builds that it has none of are not judged.

    `current` are names such as `gemm-avx2-5f1c9e2b7a04`, of every family and instruction set that runs here.
    """
    kernels = kernel_abi.rpartition("-")[0]
    return kernel_abi not in current and kernels in {name.rpartition("-")[0] for name in current}


def collect_garbage(
    store: Store, current_builds: Collection[str], keep_schedules: int | None, *, dry_run: bool
) -> Mapping[str, int]:
    """Delete rows of stale builds; of each key keep the `keep_schedules` fastest and what promotions name.

    Returns the rows deleted by table, or with `dry_run` those that would be.
    """
    stale = [one.kernel_abi for one in store.stats().builds if is_stale(one.kernel_abi, current_builds)]
    return store.collect_garbage(stale, keep_schedules, dry_run=dry_run)


class Bench(Protocol):
    """The instrument that measures here: the tuner's evaluator, handed in by the command line."""

    def obstacle(self, problem: Problem, schedule: Schedule) -> str | None:
        """Why this cannot be measured here; None where it can. A stranger's row may ask for anything."""

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> Sequence[Sample]:
        """Interleaved timings, one for each schedule and in their order, of results that were checked."""
        ...

    def compare(self, problem: Problem, candidate: Schedule, incumbent: Schedule | None) -> Comparison:
        """A paired A/B; None: against the kernel's default."""
        ...


@dataclass(frozen=True)
class Here:
    """The machine and the program that verify, and a clock."""

    machine: MachineKey
    kernel_abis: Mapping[str, str]
    """By family."""
    program_version: str
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000

    def made(self, row: Measurement) -> bool:
        """True if the row is of the kernels that run here."""
        return row.kernel_abi == self.kernel_abis.get(row.problem.family)


@dataclass(frozen=True)
class ScheduleVerdict:
    """The verdict on an imported schedule against the schedule in use here."""

    problem: Problem
    schedule: Schedule
    claimed_ns: int
    """The estimate that came with the schedule."""
    measured_ns: int
    comparison: Comparison

    @property
    def promoted(self) -> bool:
        """It is in use now: the same verdict as of a duel after a search."""
        return self.comparison.proves_faster

    @property
    def outcome(self) -> str:
        """In words, for people."""
        if self.promoted:
            return "now in use"
        return "no verdict: the machine was busy" if self.comparison.is_undecided else "not faster"


@dataclass(frozen=True)
class Candidates:
    """Imported timings of one problem, the most promising first."""

    problem: Problem
    timings: tuple[Measurement, ...]
    in_use_there: Schedule | None


def unverified_candidates(store: Store, here: Here, top: int) -> list[Candidates]:
    """The imported timings worth measuring here: what was in use there, then by estimate.

    The first `top` of each problem, without those that were measured here since. Where one was in use, only
    schedules of its arithmetic are candidates: the products of one weight have to agree in it.
    """
    in_use_there = {
        row.problem: row.sample.schedule
        for row in store.promoted_measurements(here.machine, verified=False)
        if here.made(row)
    }
    timings: dict[Problem, list[Measurement]] = {}
    for row in store.all_measurements():
        if row.origin.machine == here.machine and here.made(row):
            timings.setdefault(row.problem, []).append(row)
    found = [
        Candidates(problem, _ranked(rows, in_use_there.get(problem), top), in_use_there.get(problem))
        for problem, rows in timings.items()
    ]
    return sorted((one for one in found if one.timings), key=lambda one: astuple(one.problem))


def _ranked(rows: Sequence[Measurement], in_use_there: Schedule | None, top: int) -> tuple[Measurement, ...]:
    fastest: dict[Schedule, Measurement] = {}
    for row in sorted(rows, key=lambda row: row.sample.estimate_ns):
        schedule = row.sample.schedule
        agrees = in_use_there is None or _arithmetic(schedule) == _arithmetic(in_use_there)
        if agrees and not row.origin.verified:
            fastest.setdefault(schedule, row)
    best = sorted(fastest.values(), key=lambda row: row.sample.schedule != in_use_there)[:top]
    measured_here = {row.sample.schedule for row in rows if row.origin.verified}
    return tuple(row for row in best if row.sample.schedule not in measured_here)


def _arithmetic(schedule: Schedule) -> tuple[str, int]:
    return schedule.compute_path, schedule.k_parts


def verify(store: Store, here: Here, bench: Bench, top: int, report: Report) -> Iterator[ScheduleVerdict]:
    """Measure the best imported schedules of each problem here, and promote those that win a duel.

    What was in use where it came from fights what is in use here, and takes its place where it is proven
    faster, as after a search. Where it loses, or none was in use there, the fastest of the others is tried. A
    problem's rows are stored before its first verdict comes: stop at any time, and go on later. Where a duel
    was undecided they are not: the next run measures them again.
    `report` gets a line for each schedule that cannot be measured here; it stays unverified.
    """
    for candidates in unverified_candidates(store, here, top):
        measurable = _measurable(candidates, bench, report)
        if measurable.timings:
            yield from _verify_one(store, here, bench, measurable)


def _measurable(candidates: Candidates, bench: Bench, report: Report) -> Candidates:
    obstacles = {row: bench.obstacle(candidates.problem, row.sample.schedule) for row in candidates.timings}
    for row, obstacle in obstacles.items():
        if obstacle:
            report(f"{row.problem.describe()}: a schedule is not measured: {obstacle}")
    return replace(candidates, timings=tuple(row for row in candidates.timings if not obstacles[row]))


def _verify_one(store: Store, here: Here, bench: Bench, candidates: Candidates) -> list[ScheduleVerdict]:
    problem = candidates.problem
    kernel_abi = here.kernel_abis[problem.family]
    in_use = store.promoted_measurement(problem, here.machine, kernel_abi)
    incumbent = in_use.sample.schedule if in_use else None
    samples = bench.measure(problem, [row.sample.schedule for row in candidates.timings])
    claims = {row.sample.schedule: row.sample.estimate_ns for row in candidates.timings}
    origin = Origin(here.machine, here.program_version, here.now_ms())
    verdicts, promotions = [], []
    for sample in _challengers(samples, candidates.in_use_there):
        schedule = sample.schedule
        comparison = bench.compare(problem, schedule, incumbent)
        verdicts.append(ScheduleVerdict(problem, schedule, claims[schedule], sample.estimate_ns, comparison))
        if comparison.proves_faster:
            promotions.append(Promotion(problem, schedule, incumbent, comparison, kernel_abi, origin))
            break
    store.add_promotions(promotions)
    if promotions or not any(one.comparison.is_undecided for one in verdicts):
        store.add_measurements(Measurement(problem, sample, kernel_abi, origin) for sample in samples)
    return verdicts


def _challengers(samples: Sequence[Sample], in_use_there: Schedule | None) -> list[Sample]:
    """The schedule in use there, and then the fastest of the others."""
    others = [sample for sample in samples if sample.schedule != in_use_there]
    return [
        *(sample for sample in samples if sample.schedule == in_use_there),
        *sorted(others, key=lambda sample: sample.estimate_ns)[:1],
    ]
