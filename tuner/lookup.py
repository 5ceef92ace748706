"""Choice of the schedule for a product: the one tuned for its rows, else a near neighbour's, else the
kernels' default.

Only schedules in use count: winners of a duel with the previous schedule, the default included. Results must
not depend on the number of rows computed together, so all schedules of a weight have one arithmetic, that of
the newest; schedules in another arithmetic are left out.

A neighbour is near if its m is within a twentieth; a slice tuned for many rows serves any larger number,
since more rows only repeat it. Its tiles are made even for the actual rows: 9 rows on tiles of 8 would be 8
and 1, so tiles of 5 are taken. Between two tuned m both must have the same tile and thread grid: where they
disagree, one was a close win at its own m and loses between them. Where the default was found best, the
default for the actual rows is used; so it is where no neighbour is near, or neighbours disagree."""

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
"""The shape of a weight: family, format, n and k."""
IsDefault: TypeAlias = Callable[[Problem, Schedule], bool]
"""A predicate: True if a schedule is the kernels' own for a problem (`native.is_default_for`)."""

NEAR = 1.05
"""The largest ratio of an m to its neighbour's; schedules lose beyond it."""
REPEAT_FROM = 128
"""A schedule tuned for at least this many rows serves any larger m without a nearer schedule."""
NEIGHBOURS = ", and its neighbours"
Obstacle: TypeAlias = Callable[[Problem, Schedule], str | None]
"""A function that gives the reason why a schedule cannot run here, or None (`native.obstacle`)."""

MOST_TOLD = 5
"""The most rows of the database that are reported one by one as left out."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The schedule for products of one weight with up to `last_m` rows, from the previous choice's on. A
    choice is exact if its range holds the m at which the schedule was tuned."""

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
    """The m at which the kernels' own schedule is in use."""

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
        """The tuned m nearest in ratio; the smaller of two equally near."""
        return min(self._around(m), key=lambda tuned: max(tuned / m, m / tuned))

    def _around(self, m: int) -> list[int]:
        """The tuned m before and after an m that was not tuned, or the only one at either end."""
        index = bisect.bisect(self._ms, m)
        return self._ms[max(0, index - 1) : index + 1]

    @cached_property
    def _ms(self) -> list[int]:
        return sorted(self.tuned)


class ScheduleTable(ScheduleLookup):
    """The schedules in use on one kind of machine, for one build of the kernels."""

    def __init__(self, in_use: Iterable[Measurement] = (), is_default: IsDefault = lambda *_: False) -> None:
        """`in_use`: `Store.promoted_measurements` of one machine key and this build of the kernels."""
        rows: dict[WeightKey, list[Measurement]] = {}
        for row in in_use:
            problem = row.problem
            rows.setdefault((problem.family, problem.format, problem.n, problem.k), []).append(row)
        self._weights = {key: _weight(of_weight, is_default) for key, of_weight in rows.items()}
        self._ranges: dict[tuple[WeightKey, int], list[RowRange]] = {}
        self.asked_choice = ""
        """The value of `--arithmetic`; empty: not given."""
        self._asked_path: str | None = None
        self._bands: tuple[ScheduleTable, ...] = ()

    @property
    def bands(self) -> tuple[ScheduleTable, ...]:
        return self._bands

    def with_bands(self, bands: Sequence[ScheduleTable]) -> ScheduleTable:
        """A table with the same schedules, and the tables of a plan's bands."""
        other = copy.copy(self)
        other._bands = tuple(bands)
        return other

    @property
    def is_tuned(self) -> bool:
        """True if any schedule is in use; else every product runs with the kernels' own."""
        return bool(self._weights)

    def asked(self, choice: str, path: str | None) -> ScheduleTable:
        """A table with the same schedules under `--arithmetic choice`. `path`: the compute path for weights
        with sub-scales; None leaves it to the schedules. `canonical` affects all weights, `tiles` all but
        f32, f16 and bytes with one scale per column."""
        other = copy.copy(self)
        other.asked_choice, other._asked_path = choice, path
        return other

    def arithmetic_of(self, key: WeightKey) -> Arithmetic | None:
        """The arithmetic of a weight's schedules; None for the default, where nothing is tuned."""
        weight = self._weights.get(key)
        return None if weight is None else weight.arithmetic

    def choice(self, key: WeightKey, m: int) -> ScheduleChoice:
        """The schedule for exactly m rows of a weight."""
        weight = self._weights.get(key)
        return (
            ScheduleChoice(m, None, "default", "default: nothing tuned") if weight is None else weight.at(m)
        )

    def choices(self, key: WeightKey, max_m: int) -> list[ScheduleChoice]:
        """The schedules for every m from 1 to `max_m`, as ascending ranges. Beyond MAX_ROW_RANGES ranges,
        those that differ least in m are joined and run with one of their schedules."""
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
        """A weight's compute path (None: the default) and number of k parts, in sparse and dense storage."""
        path = self._path_for(weight)
        return self._tuned_arithmetic(weight) if path is None else (path, 1)

    def products(self, weight: PackedWeight, max_m: int) -> list[RowRange]:
        """Ranges of rows with their schedules for products of 1 to `max_m` rows; cached by shape."""
        if self.arithmetic(weight) != self._tuned_arithmetic(weight):
            return [RowRange(max_m, None, f"--arithmetic {self.asked_choice}: the default")]
        return self._row_ranges(("gemm", format_name(weight), weight.n, weight.k), max_m)

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> list[RowRange]:
        """Ranges of query rows with their schedules for attention slices of 1 to `max_m` rows."""
        return self._row_ranges(("attention", kv_format, n, k), max_m)

    def _tuned_arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        arithmetic = self.arithmetic_of(("gemm", dense_format(weight), weight.n, weight.k))
        return (None, 1) if arithmetic is None else (arithmetic.compute_path, arithmetic.k_parts)

    def _path_for(self, weight: PackedWeight) -> str | None:
        """The compute path that `--arithmetic` forces; None where it forces none: no choice was given, the
        weight has no sub-scales, or the tuned path gives the same bits."""
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
    """The schedules of a store for this kind of machine and this build (`abi_of`: `native.abi_of`). Rows with
    an obstacle are left out and reported."""
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
    """The schedule on the lowest tiles that are as many for m rows; its slice keeps its number of tiles."""
    mr = pieces(m, pieces(m, schedule.mr))
    return replace(schedule, mr=mr, block_m=pieces(schedule.block_m, schedule.mr) * mr)


def _manner(schedule: Schedule) -> tuple[int, ...]:
    """Micro-kernel and thread grid, in which two neighbours must agree."""
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
    """A range extended by the m after it, which has the same schedule."""
    if "exact" not in (before.kind, after.kind):
        return replace(after, why=before.why)
    exact = before if before.kind == "exact" else after
    why = exact.why if NEIGHBOURS in exact.why else exact.why + NEIGHBOURS
    return ScheduleChoice(after.last_m, after.schedule, "exact", why)


def _join_nearest(ranges: list[ScheduleChoice]) -> None:
    """Join the two ranges whose ends are nearest in ratio; the range of larger m keeps its schedule."""
    firsts = [1, *(choice.last_m + 1 for choice in ranges)]
    index = min(range(len(ranges) - 1), key=lambda i: ranges[i + 1].last_m / firsts[i])
    del ranges[index]
