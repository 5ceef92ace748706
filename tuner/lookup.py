"""Choice of the schedule that a product runs with: the one tuned for it, else a near neighbour's, else the
kernels' default.

Only what is in use counts: schedules that won a duel against the one before them, the default included.
Results must not depend on how many rows are computed at once, so that all schedules of a weight share one
arithmetic, that of the newest of them; those of another one are left out.

A neighbour is near enough if its m is within a twentieth; and a slice that was tuned for many rows serves
any larger number of them, since more rows only repeat it. Its tiles are made even for the rows at hand: 9
rows on tiles of 8 would be 8 and 1, so tiles of 5 are taken. Between two tuned m both must have come to the
same tile and thread grid: where they disagree, one of them was a close win at its own m, and has been seen
to lose between them. And where the default itself was found best, it is the default again that runs, made
for the rows at hand. Where nothing is near, or neighbours disagree, the default is used; it needs no
tuning.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import (
    CANONICAL,
    MAX_ROW_RANGES,
    SAME_BITS,
    TILES,
    RowRange,
    ScheduleLookup,
    canonical_path,
    tiles_path,
)
from phasewise.kerneldb.records import MachineKey, Measurement, Problem, Schedule
from phasewise.tuner.search.space import Arithmetic, pieces
from phasewise.tuner.weights import dense_format, format_name

Kind = Literal["exact", "neighbour", "default"]
WeightKey: TypeAlias = tuple[str, str, int, int]
"""The identity of a weight's shape: family, format, n and k."""
IsDefault: TypeAlias = Callable[[Problem, Schedule], bool]
"""True if a schedule is the kernels' own for a problem; `native.is_default_for` knows."""

NEAR = 1.05
"""The largest ratio of an m and its neighbour's. Farther off, schedules have been seen to lose."""
REPEAT_FROM = 128
"""A schedule tuned for at least this many rows serves any larger m that has no nearer one."""
NEIGHBOURS = ", and its neighbours"
Obstacle: TypeAlias = Callable[[Problem, Schedule], str | None]
"""The reason that a schedule cannot run here, None where it can; `native.obstacle` knows."""

MOST_TOLD = 5
"""Most rows that are left out by name."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The schedules of products of one weight, from the choice before up to `last_m` rows. A range is exact
    if it holds the m at which its schedule was tuned."""

    last_m: int
    schedule: Schedule | None
    """The schedule to run; None: the kernels' default."""
    kind: Kind
    why: str
    """The reason for the schedule in words, e.g. `neighbour: tuned at m=64`."""


@dataclass(frozen=True)
class _Weight:
    """The schedules in use for one weight, by m."""

    arithmetic: Arithmetic
    tuned: dict[int, Schedule]
    own: frozenset[int]
    """The m where the kernels' own schedule is in use."""

    def at(self, m: int) -> ScheduleChoice:
        exact = self.tuned.get(m)
        if exact is not None:
            return ScheduleChoice(m, exact, "exact", f"exact: tuned at m={m}")
        nearest = self._nearest(m)
        if max(nearest / m, m / nearest) > NEAR and not REPEAT_FROM <= nearest < m:
            return ScheduleChoice(m, None, "default", f"default: nothing tuned near, nearest is m={nearest}")
        if nearest in self.own:
            return ScheduleChoice(m, None, "default", f"default: nothing was faster at m={nearest}")
        around = self._around(m)
        if len({_manner(even_tiles(self.tuned[tuned_m], m)) for tuned_m in around}) > 1:
            both = " and ".join(f"m={tuned_m}" for tuned_m in around)
            return ScheduleChoice(m, None, "default", f"default: {both} were tuned to different tiles")
        why = f"neighbour: tuned at m={nearest}"
        return ScheduleChoice(m, even_tiles(self.tuned[nearest], m), "neighbour", why)

    def _nearest(self, m: int) -> int:
        """The tuned m nearest in ratio; the smaller of two that are as near."""
        return min(self._around(m), key=lambda tuned: max(tuned / m, m / tuned))

    def _around(self, m: int) -> list[int]:
        """The tuned m before and after an m that was not; one of them at either end."""
        index = bisect.bisect(self._ms, m)
        return self._ms[max(0, index - 1) : index + 1]

    @cached_property
    def _ms(self) -> list[int]:
        return sorted(self.tuned)


class ScheduleTable(ScheduleLookup):
    """The schedules in use on one kind of machine, of one build of the kernels."""

    def __init__(self, in_use: Iterable[Measurement] = (), is_default: IsDefault = lambda *_: False) -> None:
        """Make the table of these schedules. `in_use`: `Store.promoted_measurements` of one machine key,
        those of this build of the kernels."""
        rows: dict[WeightKey, list[Measurement]] = {}
        for row in in_use:
            problem = row.problem
            rows.setdefault((problem.family, problem.format, problem.n, problem.k), []).append(row)
        self._weights = {key: _weight(of_weight, is_default) for key, of_weight in rows.items()}
        self._ranges: dict[tuple[WeightKey, int], list[RowRange]] = {}
        self.asked_choice = ""
        """The choice that `--arithmetic` asks for; empty: none is asked for."""
        self._asked_path: str | None = None
        self._bands: tuple[ScheduleTable, ...] = ()

    @property
    def bands(self) -> tuple[ScheduleTable, ...]:
        return self._bands

    def with_bands(self, bands: Sequence[ScheduleTable]) -> ScheduleTable:
        """The same schedules, and those of the cores of a plan's bands."""
        other = copy.copy(self)
        other._bands = tuple(bands)
        return other

    @property
    def is_tuned(self) -> bool:
        """True if any schedule is in use; else every product runs by the kernels' own."""
        return bool(self._weights)

    def asked(self, choice: str, path: str | None) -> ScheduleTable:
        """The same schedules where `--arithmetic choice` is asked for. path: of weights with sub-scales; None
        leaves it to the schedules. `canonical` is of all weights, `tiles` of all but f32, f16 and bytes with
        a scale for a column."""
        other = copy.copy(self)
        other.asked_choice, other._asked_path = choice, path
        return other

    def arithmetic_of(self, key: WeightKey) -> Arithmetic | None:
        """The way of computing that its schedules share; None: the default one, nothing is tuned."""
        weight = self._weights.get(key)
        return None if weight is None else weight.arithmetic

    def choice(self, key: WeightKey, m: int) -> ScheduleChoice:
        """The choice for exactly m rows of a weight."""
        weight = self._weights.get(key)
        return (
            ScheduleChoice(m, None, "default", "default: nothing tuned") if weight is None else weight.at(m)
        )

    def choices(self, key: WeightKey, max_m: int) -> list[ScheduleChoice]:
        """The choices for every m from 1 to `max_m`: ranges of m, ascending, at most MAX_ROW_RANGES. Where
        there would be more, the ranges that differ least in m are joined and run with one of their
        schedules."""
        ranges: list[ScheduleChoice] = []
        for m in range(1, max_m + 1):
            choice = self.choice(key, m)
            if ranges and ranges[-1].schedule == choice.schedule:
                choice = _joined(ranges.pop(), choice)
            ranges.append(choice)
        while len(ranges) > MAX_ROW_RANGES:
            _join_nearest(ranges)
        return ranges

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        """Compute path (None: the default one) and number of k parts; the same whatever the storage."""
        path = self._path_for(weight)
        return self._tuned_arithmetic(weight) if path is None else (path, 1)

    def products(self, weight: PackedWeight, max_m: int) -> list[RowRange]:
        """Ranges for products of 1 to `max_m` rows; kept, since a model has many weights and few shapes."""
        if self.arithmetic(weight) != self._tuned_arithmetic(weight):
            return [RowRange(max_m, None, f"--arithmetic {self.asked_choice}: the default")]
        return self._row_ranges(("gemm", format_name(weight), weight.n, weight.k), max_m)

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> list[RowRange]:
        """Ranges for slices of 1 to `max_m` query rows."""
        return self._row_ranges(("attention", kv_format, n, k), max_m)

    def _tuned_arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        arithmetic = self.arithmetic_of(("gemm", dense_format(weight), weight.n, weight.k))
        return (None, 1) if arithmetic is None else (arithmetic.compute_path, arithmetic.k_parts)

    def _path_for(self, weight: PackedWeight) -> str | None:
        """The path that was asked for; None where none was, or where the weight has no sub-scales, or where
        what is tuned has the bits that were asked for."""
        if self.asked_choice in (CANONICAL, TILES):
            tuned, n_parts = self._tuned_arithmetic(weight)
            path = canonical_path(weight) if self.asked_choice == CANONICAL else tiles_path(weight)
            is_equal = path is None or (
                n_parts == 1
                and tuned is not None
                and SAME_BITS.get(tuned, tuned) == SAME_BITS.get(path, path)
            )
            return None if is_equal else path
        blocks = BLOCKS.get(weight.kind)
        return self._asked_path if blocks is not None and blocks.has_subs else None

    def _row_ranges(self, key: WeightKey, max_m: int) -> list[RowRange]:
        if (key, max_m) not in self._ranges:
            self._ranges[key, max_m] = [
                RowRange(choice.last_m, choice.schedule.walk if choice.schedule else None, choice.why)
                for choice in self.choices(key, max_m)
            ]
        return self._ranges[key, max_m]


class ScheduleStore(Protocol):
    """The part of a store that `read_table` needs."""

    def promoted_measurements(self, machine: MachineKey) -> list[Measurement]: ...


def read_table(
    store: ScheduleStore,
    machine: MachineKey,
    abi_of: Callable[[str], str | None],
    is_default: IsDefault = lambda *_: False,
    obstacle: Obstacle = lambda *_: None,
    report: Callable[[str], None] = lambda _: None,
) -> ScheduleTable:
    """The schedules of a store for this kind of machine and this build; `abi_of` is `native.abi_of`. A row
    that has an obstacle is left out, and reported."""
    rows = store.promoted_measurements(machine)
    of_build = [row for row in rows if row.kernel_abi == abi_of(row.problem.family)]
    obstacles = [obstacle(row.problem, row.sample.schedule) for row in of_build]
    left_out = [(row, why) for row, why in zip(of_build, obstacles, strict=True) if why]
    for row, why in left_out[:MOST_TOLD]:
        report(f"{row.problem.describe()}: a schedule of the database is left out: {why}")
    if len(left_out) > MOST_TOLD:
        report(f"{len(left_out) - MOST_TOLD} more schedules of the database are left out")
    usable = (row for row, why in zip(of_build, obstacles, strict=True) if not why)
    return ScheduleTable(usable, is_default)


def even_tiles(schedule: Schedule, m: int) -> Schedule:
    """The schedule on the lowest tiles of rows that are as many for m rows; its slice holds as many tiles."""
    mr = pieces(m, pieces(m, schedule.mr))
    return replace(schedule, mr=mr, block_m=pieces(schedule.block_m, schedule.mr) * mr)


def _manner(schedule: Schedule) -> tuple[int, ...]:
    """Micro-kernel and thread grid: what two neighbours must agree on."""
    return (schedule.mr, schedule.panels, schedule.threads_m, schedule.threads_n, schedule.threads_k)


def _weight(rows: Sequence[Measurement], is_default: IsDefault) -> _Weight:
    newest = max(rows, key=lambda row: row.origin.created_at_ms)
    arithmetic = _arithmetic(newest)
    used = [row for row in rows if _arithmetic(row) == arithmetic]
    tuned = {row.problem.m: row.sample.schedule for row in used}
    own = frozenset(row.problem.m for row in used if is_default(row.problem, row.sample.schedule))
    return _Weight(arithmetic, tuned, own)


def _arithmetic(row: Measurement) -> Arithmetic:
    return Arithmetic(row.sample.schedule.compute_path, row.sample.schedule.k_parts)


def _joined(before: ScheduleChoice, after: ScheduleChoice) -> ScheduleChoice:
    """A range and the m after it, which runs with the same schedule."""
    if "exact" not in (before.kind, after.kind):
        return replace(after, why=before.why)
    exact = before if before.kind == "exact" else after
    why = exact.why if NEIGHBOURS in exact.why else exact.why + NEIGHBOURS
    return ScheduleChoice(after.last_m, after.schedule, "exact", why)


def _join_nearest(ranges: list[ScheduleChoice]) -> None:
    """Join the two ranges whose ends are nearest in ratio. The larger m, where more is at stake, decides."""
    firsts = [1, *(choice.last_m + 1 for choice in ranges)]
    index = min(range(len(ranges) - 1), key=lambda i: ranges[i + 1].last_m / firsts[i])
    del ranges[index]
