"""The cost of a schedule by arithmetic alone: the starting point of searches, and all that MikPoly-style
has.

The model knows four things: a micro-kernel's instructions, the bytes that each cache level must deliver, that
a grid waits for its largest region, and what a slice costs to begin. It ranks well enough to start from and
is wrong by tens of per cent in the details, which is why the searches measure.
"""

from __future__ import annotations

from phasewise.kerneldb.records import PANEL_COLUMNS, Schedule
from phasewise.tuner.search.space import (
    AXES,
    Axis,
    MicroKernel,
    ScheduleSpace,
    ThreadGrid,
    grid_of,
    kernel_of,
    pieces,
    resized,
)

# In cycles of one core: bytes that a level delivers in each, and what beginning something costs.
L1_BYTES, L2_BYTES, MEMORY_BYTES = 64.0, 32.0, 8.0
TILE_CYCLES, SLICE_CYCLES, REDUCTION_CYCLES_PER_OUTPUT = 12.0, 150.0, 0.25
VECTOR_BYTES = 64


def kernel_cycles_per_vector_row(kernel: MicroKernel) -> float:
    """Cycles of one step of a tile: two multiply-adds or two loads each, but no faster than sums come back.

    A vector row is 64 bytes of one panel. Four cycles later a sum may be added to again, so that fewer than
    eight sums leave the units idle.
    """
    multiplies, loads = kernel.mr * kernel.panels, kernel.mr + kernel.panels
    return max(multiplies / 2, loads / 2, 4.0)


def modelled_cycles(space: ScheduleSpace, schedule: Schedule) -> float:
    """Cycles of the thread that has the largest region."""
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
    """The kernel's schedule by the model: blocks that half fill caches, the grid of least cost."""
    return min(
        (_blocked(space, kernel, grid) for grid in space.grids(kernel)),
        key=lambda schedule: modelled_cycles(space, schedule),
    )


def _blocked(space: ScheduleSpace, kernel: MicroKernel, grid: ThreadGrid) -> Schedule:
    """The schedule of a grid with blocks by the size of caches: a tile's weights take half of L1; a block's
    weights half of L2, its rows a quarter."""
    schedule = space.smallest(kernel, grid)
    inputs = space.region(grid, kernel).inputs
    column_bytes = inputs * space.weight_bits / 8
    limits: dict[Axis, float] = {
        "block_k": space.caches.l1_bytes / 2 / (schedule.nr * space.weight_bits / 8),
        "block_m": space.caches.l2_bytes / 4 / (inputs * 2),
        "block_n": space.caches.l2_bytes / 2 / column_bytes,
    }
    if space.problem.m <= kernel.mr:
        limits["block_k"] = inputs  # nothing is read twice: a pass less is a pass less
    for axis in AXES:
        ladder = space.ladder(axis, schedule)
        size = max((rung for rung in ladder if rung <= limits[axis]), default=ladder[0])
        schedule = resized(schedule, axis, size)
    return space.fitted(schedule)


def _slices(space: ScheduleSpace, schedule: Schedule) -> int:
    region = space.region(grid_of(schedule), kernel_of(schedule))
    return pieces(region.rows, schedule.block_m) * pieces(region.columns, schedule.block_n)


def _weight_cycles(space: ScheduleSpace, schedule: Schedule) -> float:
    """Cycles of reading weights: once from memory, and again for each block of rows where a block of weights
    outgrows L2."""
    region = space.region(grid_of(schedule), kernel_of(schedule))
    column_bytes = region.inputs * space.weight_bits / 8
    row_blocks, kept_columns = pieces(region.rows, schedule.block_m), region.columns
    if schedule.loop_order == "nm":
        kept_columns = min(schedule.block_n, region.columns)
    again = L2_BYTES if kept_columns * column_bytes <= space.caches.l2_bytes / 2 else MEMORY_BYTES
    return region.columns * column_bytes * (1 / MEMORY_BYTES + (row_blocks - 1) / again)


def _row_cycles(space: ScheduleSpace, schedule: Schedule) -> float:
    """Cycles of reading rows: again by every tile of columns, from L2 where a block of rows fits there."""
    region = space.region(grid_of(schedule), kernel_of(schedule))
    block_bytes = min(schedule.block_m, region.rows) * region.inputs * 2
    column_tiles = region.columns / schedule.nr
    rate = L2_BYTES if block_bytes <= space.caches.l2_bytes / 2 else MEMORY_BYTES
    return region.rows * region.inputs * 2 * column_tiles / rate / 4
