"""The ledger of one kind of machine: the samples and verdicts in the database, and those that a run adds.

A stored timing is never repeated: the i-th stored sample of a schedule answers the i-th time that a search
asks for it. So a run resumes by asking again, and runs that share a database share work."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from phasewise.kerneldb.records import (
    MAX_GAIN,
    Comparison,
    MachineKey,
    Measurement,
    Origin,
    Problem,
    Promotion,
    Sample,
    Schedule,
)
from phasewise.kerneldb.store import Store

if TYPE_CHECKING:
    from phasewise.tuner.lookup import IsDefault


@dataclass(frozen=True, slots=True)
class Scope:
    """The keys of a run's rows in the database, and the age limit of rows that it uses."""

    machine: MachineKey
    kernel_abi: str
    program_version: str
    since_ms: int = 0
    """Unix time in ms before which samples are ignored; a run that does not resume begins now."""


class Ledger:
    """Samples and verdicts of a scope. Additions are committed when the call returns."""

    def __init__(self, store: Store, scope: Scope) -> None:
        self._store = store
        self._scope = scope
        self._samples: dict[Problem, dict[Schedule, list[Sample]]] = {}
        self._weights_read: set[Problem] = set()
        """Weights whose rows have been read, each as a problem with m = 1."""
        self._row_counts: dict[Problem, int] = {}
        self._verdicts: dict[Problem, list[Promotion]] = {}

    def samples(self, problem: Problem) -> Mapping[Schedule, Sequence[Sample]]:
        """A problem's samples by schedule, oldest first. The first call for a weight reads all of its
        rows."""
        weight = replace(problem, m=1)
        if weight not in self._weights_read:
            problems = set(self._samples)
            for row in self._store.measurements_of_every_m(problem, *self._key):
                if row.problem not in problems:
                    self._take(row)
            self._weights_read.add(weight)
        return self._samples.setdefault(problem, {})

    def begun_ms(self, problems: Sequence[Problem]) -> int | None:
        """Unix ms of the first stored sample of any of these problems of one weight; None: there is none."""
        return self._store.begun_ms(problems, *self._key, self._scope.since_ms)

    def settled_ms(self, problems: Sequence[Problem]) -> float:
        """Unix ms at which the last of these problems got its first verdict; infinite: not all have one."""
        firsts = (next(iter(self._own_verdicts(problem)), None) for problem in problems)
        return max((first.origin.created_at_ms if first else math.inf for first in firsts), default=math.inf)

    def in_use(self, problem: Problem, at_ms: float) -> Promotion:
        """The last verdict at that time; there must be one."""
        before = [row for row in self._own_verdicts(problem) if row.origin.created_at_ms <= at_ms]
        return before[-1]

    def _own_verdicts(self, problem: Problem) -> list[Promotion]:
        """A problem's verdicts that are new enough for the scope."""
        rows = self.verdicts(problem)
        return [row for row in rows if row.origin.created_at_ms >= self._scope.since_ms]

    def refresh(self, problem: Problem) -> None:
        """Read the problem's rows again if another process has added some."""
        if self._store.measurement_count(problem, *self._key) == self._row_counts.get(problem, 0):
            return
        self._samples[problem] = {}
        self._row_counts[problem] = 0
        for row in self._store.measurements(problem, *self._key):
            self._take(row)

    def add(self, problem: Problem, samples: Sequence[Sample]) -> None:
        """Store samples that were timed together, in one transaction."""
        origin = self._origin()
        rows = [Measurement(problem, sample, self._scope.kernel_abi, origin) for sample in samples]
        self._store.add(rows)
        for row in rows:
            self._take(row)

    def verdicts(self, problem: Problem) -> Sequence[Promotion]:
        """The outcomes of a problem's duels, oldest first: the last one's winner is in use."""
        if problem not in self._verdicts:
            machine, abi = self._key
            rows = self._store.rows(
                Promotion, problem=problem, machine=machine, kernel_abi=abi, verified=True
            )
            self._verdicts[problem] = rows
        return self._verdicts[problem]

    def add_verdict(
        self, problem: Problem, winner: Schedule, loser: Schedule, comparison: Comparison
    ) -> None:
        """Store that `winner` is in use from now on. `comparison`: `winner` as candidate against `loser`."""
        row = Promotion(problem, winner, loser, comparison, self._scope.kernel_abi, self._origin())
        self._store.add([row])
        self._verdicts.pop(problem, None)

    @property
    def _key(self) -> tuple[MachineKey, str]:
        return self._scope.machine, self._scope.kernel_abi

    def _take(self, row: Measurement) -> None:
        self._row_counts[row.problem] = self._row_counts.get(row.problem, 0) + 1
        if row.origin.verified and row.origin.created_at_ms >= self._scope.since_ms:
            self._samples.setdefault(row.problem, {}).setdefault(row.sample.schedule, []).append(row.sample)

    def _origin(self) -> Origin:
        now_ms = time.time_ns() // 1_000_000
        return Origin(self._scope.machine, self._scope.program_version, now_ms)


def reversed_comparison(comparison: Comparison) -> Comparison:
    """A duel's comparison with candidate and incumbent exchanged."""
    return replace(
        comparison,
        gain=1 / comparison.gain,
        gain_low=1 / comparison.gain_high,
        gain_high=1 / comparison.gain_low,
    )


@dataclass(frozen=True)
class MeasuredRatio:
    """A measured gain over the kernels' own schedule, or between two alternatives, with its interval; 1 for
    no change."""

    gain: float = 1.0
    low: float = 1.0
    high: float = 1.0

    def times(self, won: Comparison) -> MeasuredRatio:
        """The gain after one more duel was won."""
        high = min(MAX_GAIN, self.high * won.gain_high)
        return MeasuredRatio(self.gain * won.gain, self.low * won.gain_low, high)


def mean_of(gains: Iterable[MeasuredRatio]) -> MeasuredRatio:
    """The geometric means of gains and of the ends of their intervals."""
    several = list(gains)
    return MeasuredRatio(
        *(_mean(getattr(each, name) for each in several) for name in ("gain", "low", "high"))
    )


def _mean(ratios: Iterable[float]) -> float:
    logarithms = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms))


class ScheduleInUse(NamedTuple):
    """The schedule in use for a product, and its gain over the default."""

    schedule: Schedule
    gain: MeasuredRatio


def in_use_after(before: ScheduleInUse | None, won: Promotion, is_default: IsDefault) -> ScheduleInUse:
    """The schedule in use after a duel. If a first winner is not proven faster, and its opponent is not known
    to be the default, the winner counts as the default."""
    winner, loser, comparison = won.schedule, won.incumbent, won.comparison
    if is_default(won.problem, winner):
        return ScheduleInUse(winner, MeasuredRatio())
    if before is None:
        beat_default = loser is None or is_default(won.problem, loser) or comparison.proves_faster
        return ScheduleInUse(winner, MeasuredRatio().times(comparison) if beat_default else MeasuredRatio())
    if winner == before.schedule:  # it stays
        return before
    return ScheduleInUse(winner, before.gain.times(comparison))
