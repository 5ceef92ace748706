"""The schedules of one product, from which every search chooses.

A product is cut twice. The thread grid cuts it into regions, one for each thread; within its region a thread
works on one computation slice of `block_m x block_n x block_k` at a time. Slice sizes lie on ladders: the
sizes that cut a region into 1, 2, 3, 4, 6, 8, 12, .. even pieces, because a thin last piece is slower than
even ones. So a ladder has two rungs to an octave, and its ends are the micro-kernel and the whole region.

`modelled_cycles` is the cost of a schedule by arithmetic alone, from which searches start. It knows a
micro-kernel's instructions, the bytes that each cache level must deliver, that a grid waits for its largest
region, and the cost to begin a slice. It ranks well enough to start from and is wrong by tens of per cent in
details, which is why searches measure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from phasewise.kerneldb.records import GROUP, LOOP_ORDERS, PANEL_COLUMNS, Problem, Schedule

Axis = Literal["block_m", "block_n", "block_k"]
AXES: tuple[Axis, ...] = ("block_k", "block_m", "block_n")
"""The axes of a slice in the order of a fast start; k last, since every tile pays for passes over k."""

MAX_PIECES = 96
"""The most pieces of a region along one axis: with more, loops cost more than slices save."""

MIN_PASS_INPUTS = 4 * GROUP
"""The least inputs of a pass over k: shorter passes spend their time on storing and loading sums."""

PREFETCH_BYTES = (0, 1024, 2048, 4096, 16384)
"""Distances of the prefetch, in bytes; from 8 KiB on into L2 only (families/gemm_tiles.h: ask_for)."""
START_PREFETCH_BYTES = 2048
"""The prefetch distance at which searches begin: memory latency times a core's share of bandwidth."""


@dataclass(frozen=True, slots=True, order=True)
class MicroKernel:
    """A tile held in registers: `mr` rows by `panels` panels of 16 columns."""

    mr: int
    panels: int

    def unlike(self, other: MicroKernel) -> float:
        """The difference of two tiles: 0 if equal, log 2 if one side is twice as long."""
        return abs(math.log(self.mr / other.mr)) + abs(math.log(self.panels / other.panels))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The settings that decide the bits of a product, the same for every m of a weight."""

    compute_path: str
    k_parts: int = 1


def arithmetic_of(schedule: Schedule) -> Arithmetic:
    return Arithmetic(schedule.compute_path, schedule.k_parts)


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches that one core has for itself."""

    l1_bytes: int
    l2_bytes: int


@dataclass(frozen=True, slots=True)
class ThreadGrid:
    """Numbers of threads over rows, columns and parts of k."""

    m: int
    n: int
    k: int

    @property
    def threads(self) -> int:
        return self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Region:
    """The largest share of one thread, with columns padded to panels and inputs to groups."""

    rows: int
    columns: int
    inputs: int


@dataclass(frozen=True)
class ScheduleSpace:
    """All schedules of one product in one arithmetic."""

    problem: Problem
    arithmetic: Arithmetic
    threads: int
    kernels: tuple[MicroKernel, ...]
    """The micro-kernels to consider: `fitting` of those that exist for the compute path."""
    caches: Caches
    weight_bits: int
    """Bits of one weight as the kernel reads it from memory, scales included."""
    prefetches: tuple[int, ...] = PREFETCH_BYTES
    orders: tuple[str, ...] = LOOP_ORDERS

    def grids(self, kernel: MicroKernel) -> list[ThreadGrid]:
        """Every grid that gives all threads work; if there is none, the largest grids."""
        row_tiles, panels = pieces(self.problem.m, kernel.mr), pieces(self.problem.n, PANEL_COLUMNS)
        grids = [
            ThreadGrid(m, n, k)
            for k in dict.fromkeys((1, self.arithmetic.k_parts))
            for m in range(1, min(self.threads // k, row_tiles) + 1)
            for n in [min(self.threads // (k * m), panels)]
            if n
        ]
        most = max(grid.threads for grid in grids)
        return [grid for grid in grids if grid.threads == most]

    def region(self, grid: ThreadGrid, kernel: MicroKernel) -> Region:
        """The largest region of one thread under a grid: rows are cut between tiles, columns between panels,
        and k always at the same parts."""
        groups = pieces(self.problem.k, GROUP)
        row_tiles, panels = pieces(self.problem.m, kernel.mr), pieces(self.problem.n, PANEL_COLUMNS)
        return Region(
            pieces(row_tiles, grid.m) * kernel.mr,
            pieces(panels, grid.n) * PANEL_COLUMNS,
            pieces(groups, self.arithmetic.k_parts) * GROUP,
        )

    def ladder(self, axis: Axis, schedule: Schedule) -> list[int]:
        """The ascending sizes that a slice may have along an axis under this schedule's grid."""
        unit, extent = self._unit_and_extent(axis, schedule)
        sizes = [unit * size for size in even_sizes(pieces(extent, unit))]
        return [size for size in sizes if axis != "block_k" or size >= min(MIN_PASS_INPUTS, extent)]

    def fitted(self, schedule: Schedule) -> Schedule:
        """The schedule in canonical form: this arithmetic, no block larger than its region, and the first
        loop order where the order has no effect. The grid must be one of `grids`."""
        schedule = replace(
            schedule, compute_path=self.arithmetic.compute_path, k_parts=self.arithmetic.k_parts
        )
        for axis in AXES:
            unit, extent = self._unit_and_extent(axis, schedule)
            units = min(pieces(getattr(schedule, axis), unit), pieces(extent, unit))
            schedule = resized(schedule, axis, unit * units)
        return schedule if self.order_matters(schedule) else replace(schedule, loop_order=self.orders[0])

    def regridded(self, schedule: Schedule, grid: ThreadGrid) -> Schedule:
        """The schedule under another grid, with its slice on the ladders of the new region."""
        schedule = replace(schedule, threads_m=grid.m, threads_n=grid.n, threads_k=grid.k)
        for axis in AXES:
            ladder, size = self.ladder(axis, schedule), getattr(schedule, axis)
            schedule = resized(
                schedule, axis, max((rung for rung in ladder if rung <= size), default=ladder[0])
            )
        return self.fitted(schedule)

    def smallest(self, kernel: MicroKernel, grid: ThreadGrid) -> Schedule:
        """The slice of one micro-kernel with the shortest pass over k, which begins a fast start."""
        near = [ahead for ahead in self.prefetches if ahead <= START_PREFETCH_BYTES]
        smallest = Schedule(
            mr=kernel.mr,
            panels=kernel.panels,
            block_m=kernel.mr,
            block_n=PANEL_COLUMNS * kernel.panels,
            block_k=GROUP,
            threads_m=grid.m,
            threads_n=grid.n,
            threads_k=grid.k,
            compute_path=self.arithmetic.compute_path,
            k_parts=self.arithmetic.k_parts,
            prefetch_bytes=max(near, default=self.prefetches[0]),
            loop_order=self.orders[0],
        )
        return replace(smallest, block_k=self.ladder("block_k", smallest)[0])

    def _unit_and_extent(self, axis: Axis, schedule: Schedule) -> tuple[int, int]:
        region = self.region(grid_of(schedule), kernel_of(schedule))
        if axis == "block_m":
            return schedule.mr, region.rows
        return (schedule.nr, region.columns) if axis == "block_n" else (GROUP, region.inputs)

    def order_matters(self, schedule: Schedule) -> bool:
        """True if loops over blocks of rows and of columns may go in either order."""
        region = self.region(grid_of(schedule), kernel_of(schedule))
        return schedule.block_m < region.rows and schedule.block_n < region.columns


def resized(schedule: Schedule, axis: Axis, size: int) -> Schedule:
    """The schedule with a slice of another size along one axis."""
    if axis == "block_m":
        return replace(schedule, block_m=size)
    return replace(schedule, block_n=size) if axis == "block_n" else replace(schedule, block_k=size)


def pieces(extent: int, size: int) -> int:
    """The number of pieces of a size that cover an extent."""
    return -(-extent // size)


def even_sizes(extent: int) -> list[int]:
    """The ascending sizes that cut an extent into 1, 2, 3, 4, 6, 8, 12, .. even pieces."""
    counts = [1, *(count for power in range(1, 7) for count in (2**power, 3 * 2 ** (power - 1)))]
    most = min(extent, MAX_PIECES)
    return sorted({pieces(extent, count) for count in [*counts, most] if count <= most})


def kernel_of(schedule: Schedule) -> MicroKernel:
    return MicroKernel(schedule.mr, schedule.panels)


def grid_of(schedule: Schedule) -> ThreadGrid:
    return ThreadGrid(schedule.threads_m, schedule.threads_n, schedule.threads_k)


def fitting(kernels: tuple[MicroKernel, ...], m: int) -> tuple[MicroKernel, ...]:
    """The kernels worth trying for m rows, without those for which a lower one makes no more tiles. For 9
    rows, tiles of 8 (8 + 1) are slower than tiles of 5 (5 + 4)."""
    return tuple(
        kernel
        for kernel in kernels
        if not any(
            other.panels == kernel.panels
            and other.mr < kernel.mr
            and pieces(m, other.mr) == pieces(m, kernel.mr)
            for other in kernels
        )
    )


# In cycles of one core: bytes that a level delivers in each, and the costs of beginnings.
L1_BYTES, L2_BYTES, MEMORY_BYTES = 64.0, 32.0, 8.0
TILE_CYCLES, SLICE_CYCLES, REDUCTION_CYCLES_PER_OUTPUT = 12.0, 150.0, 0.25
VECTOR_BYTES = 64


def kernel_cycles_per_vector_row(kernel: MicroKernel) -> float:
    """Cycles of one step of a tile: two multiply-adds or two loads each, but at least the latency of sums. A
    vector row is 64 bytes of one panel. A sum may be added to again after four cycles, so that fewer than
    eight sums leave the units idle."""
    multiplies, loads = kernel.mr * kernel.panels, kernel.mr + kernel.panels
    return max(multiplies / 2, loads / 2, 4.0)


def modelled_cycles(space: ScheduleSpace, schedule: Schedule) -> float:
    """Modelled cycles of the thread with the largest region."""
    kernel, grid = kernel_of(schedule), grid_of(schedule)
    region = space.region(grid, kernel)
    rounds = space.arithmetic.k_parts // grid.k
    inputs_per_row = max(1.0, VECTOR_BYTES * 8 / (space.weight_bits * PANEL_COLUMNS))
    steps = region.inputs / inputs_per_row
    row_tiles = pieces(region.rows, kernel.mr)
    column_tiles = region.columns / (PANEL_COLUMNS * kernel.panels)
    passes = pieces(region.inputs, schedule.block_k)
    tiles = row_tiles * column_tiles
    compute = tiles * steps * kernel_cycles_per_vector_row(kernel)
    sums = tiles * (passes - 1) * 2 * kernel.mr * kernel.panels * VECTOR_BYTES / L1_BYTES
    overhead = tiles * passes * TILE_CYCLES + _slices(space, schedule) * SLICE_CYCLES
    traffic = _weight_cycles(space, schedule) + _row_cycles(space, schedule)
    reduction = region.rows * region.columns * REDUCTION_CYCLES_PER_OUTPUT * (space.arithmetic.k_parts - 1)
    return rounds * (max(compute, traffic) + sums + overhead) + reduction


def model_schedule(space: ScheduleSpace, kernel: MicroKernel) -> Schedule:
    """The kernel's schedule by the model: blocks that half fill caches, and the grid of least cost."""
    return min(
        (_blocked(space, kernel, grid) for grid in space.grids(kernel)),
        key=lambda schedule: modelled_cycles(space, schedule),
    )


def _blocked(space: ScheduleSpace, kernel: MicroKernel, grid: ThreadGrid) -> Schedule:
    """The schedule of a grid with blocks by cache sizes: a tile's weights take half of L1; a block's weights
    half of L2, its rows a quarter."""
    schedule = space.smallest(kernel, grid)
    inputs = space.region(grid, kernel).inputs
    column_bytes = inputs * space.weight_bits / 8
    limits: dict[Axis, float] = {
        "block_k": space.caches.l1_bytes / 2 / (schedule.nr * space.weight_bits / 8),
        "block_m": space.caches.l2_bytes / 4 / (inputs * 2),
        "block_n": space.caches.l2_bytes / 2 / column_bytes,
    }
    if space.problem.m <= kernel.mr:
        limits["block_k"] = inputs  # nothing is read twice, so that further passes gain nothing
    for axis in AXES:
        ladder = space.ladder(axis, schedule)
        size = max((rung for rung in ladder if rung <= limits[axis]), default=ladder[0])
        schedule = resized(schedule, axis, size)
    return space.fitted(schedule)


def _slices(space: ScheduleSpace, schedule: Schedule) -> int:
    region = space.region(grid_of(schedule), kernel_of(schedule))
    return pieces(region.rows, schedule.block_m) * pieces(region.columns, schedule.block_n)


def _weight_cycles(space: ScheduleSpace, schedule: Schedule) -> float:
    """Cycles of reading weights: from memory once, and again per block of rows if a block outgrows L2."""
    region = space.region(grid_of(schedule), kernel_of(schedule))
    column_bytes = region.inputs * space.weight_bits / 8
    row_blocks, kept_columns = pieces(region.rows, schedule.block_m), region.columns
    if schedule.loop_order == "nm":
        kept_columns = min(schedule.block_n, region.columns)
    again = L2_BYTES if kept_columns * column_bytes <= space.caches.l2_bytes / 2 else MEMORY_BYTES
    return region.columns * column_bytes * (1 / MEMORY_BYTES + (row_blocks - 1) / again)


def _row_cycles(space: ScheduleSpace, schedule: Schedule) -> float:
    """Cycles of reading rows: once per tile of columns, from L2 where a block of rows fits there."""
    region = space.region(grid_of(schedule), kernel_of(schedule))
    block_bytes = min(schedule.block_m, region.rows) * region.inputs * 2
    column_tiles = region.columns / schedule.nr
    rate = L2_BYTES if block_bytes <= space.caches.l2_bytes / 2 else MEMORY_BYTES
    return region.rows * region.inputs * 2 * column_tiles / rate / 4
