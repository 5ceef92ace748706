"""Searches that a tuner's own is held against: every schedule, drawn ones, and those of MikPoly and Roller.

*MikPoly* (Yu et al., ASPLOS 2024): a cost model chooses how micro-kernels fill a shape. It times micro-
kernels once and then decides for each shape by arithmetic: the product is a number of slices, each costs
what its micro-kernel was timed at, and the grid takes as many rounds as its busiest core has slices.
Choosing is free, but the model cannot tell schedules apart that cut a product into equally many slices of
equal size, and knows nothing of how slices share caches (Sandwich, section 3.2). Here every micro-kernel is
timed once, on the slice that half fills the caches; all schedules of the space are ranked by the model with
the kernels' measured rates; the first one is the answer and is timed, but not compared.

*Roller* (Zhu et al., OSDI 2022): scale up on one core, then scale out. It looks for the slice that one core
likes best and repeats it over all cores. It steps evenly, one unit of the hardware at a time, and never
asks what a slice leaves for the other cores; that is where it falls behind on shapes with few slices
(Sandwich, section 3.2). Here, over the same candidates as the other searches, the slice grows from the
micro-kernels that keep the units busiest one rung at a time along the axis that gains most, timed on one
thread; the few fastest slices are then cut over all threads, on the grid that leaves the slowest thread the
fewest of them, and the faster whole product wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.protocol import Search, T, cost, fastest, relayed, together
from phasewise.tuner.search.space import (
    AXES,
    START_PREFETCH_BYTES,
    MicroKernel,
    ScheduleSpace,
    ThreadGrid,
    grid_of,
    kernel_cycles_per_vector_row,
    kernel_of,
    model_schedule,
    modelled_cycles,
    pieces,
    resized,
)

BATCH = 64


def holds(space: ScheduleSpace, schedule: Schedule) -> bool:
    """True if a schedule is of this product: kernel, arithmetic, a grid of all threads, canonical."""
    kernel = kernel_of(schedule)
    is_possible = kernel in space.kernels and grid_of(schedule) in space.grids(kernel)
    return is_possible and schedule == space.fitted(schedule)


def every_schedule(space: ScheduleSpace) -> Iterator[Schedule]:
    """Every schedule on the ladders, each once."""
    for kernel in space.kernels:
        for grid in space.grids(kernel):
            yield from _under(space, space.smallest(kernel, grid))


def _under(space: ScheduleSpace, start: Schedule) -> Iterator[Schedule]:
    for sizes in itertools.product(*(space.ladder(axis, start) for axis in AXES)):
        sized = start
        for axis, size in zip(AXES, sizes, strict=True):
            sized = resized(sized, axis, size)
        orders = space.orders if space.order_matters(sized) else space.orders[:1]
        for order, prefetch_bytes in itertools.product(orders, space.prefetches):
            yield replace(sized, loop_order=order, prefetch_bytes=prefetch_bytes)


def exhaustive(space: ScheduleSpace, batch: int = BATCH) -> Search[Schedule]:
    """Time every schedule, a batch at a time."""
    best: list[Sample] = []
    schedules = every_schedule(space)
    while asked := list(itertools.islice(schedules, batch)):
        samples = yield asked
        best = [fastest([*best, *samples])]
    return best[0].schedule


def mikpoly(space: ScheduleSpace) -> Search[Schedule]:
    """Search one product: one sample for each micro-kernel, and one of the result."""
    space = replace(space, prefetches=(START_PREFETCH_BYTES,))  # of which the model knows nothing
    first = [model_schedule(space, kernel) for kernel in space.kernels]
    samples = yield first
    rates = {kernel_of(sample.schedule): _ns_per_modelled_cycle(space, sample) for sample in samples}
    best = min(
        every_schedule(space),
        key=lambda schedule: modelled_cycles(space, schedule) * rates[kernel_of(schedule)],
    )
    if best not in first:
        yield [best]
    return best


def _ns_per_modelled_cycle(space: ScheduleSpace, sample: Sample) -> float:
    return sample.estimate_ns / modelled_cycles(space, sample.schedule)


def random(space: ScheduleSpace, count: int, seed: int = 0) -> Search[Schedule]:
    """Time `count` different schedules of the space (all of a smaller one), in one batch."""
    schedules = list(every_schedule(space))
    drawn = Random(seed).sample(schedules, min(count, len(schedules)))
    return fastest((yield drawn)).schedule


@dataclass(frozen=True)
class RollerOptions:
    """The share of the space that is looked at."""

    kernels: int = 4
    """Micro-kernels that are scaled up: those with the most work for each cycle."""
    scaled_out: int = 10
    """Slices that are tried on all threads; the paper's top ten."""
    gain: float = 0.0
    """A step must be faster by this share."""


def roller(space: ScheduleSpace, options: RollerOptions | None = None) -> Search[Schedule]:
    """Search one product."""
    options = RollerOptions() if options is None else options
    alone = replace(space, threads=1)
    kernels = sorted(space.kernels, key=_cycles_for_each_product)[: options.kernels]
    single: dict[Schedule, Sample] = {}
    yield from remembered(together([_scale_up(alone, kernel, options.gain) for kernel in kernels]), single)
    best = sorted(single.values(), key=cost)[: options.scaled_out]
    spread = dict.fromkeys(_scaled_out(space, sample.schedule) for sample in best)
    return fastest((yield list(spread))).schedule


def remembered(search: Search[T], memory: dict[Schedule, Sample]) -> Search[T]:
    """The same search, without asking for what `memory` holds, which gets every new sample."""

    def answer(asked: list[Schedule]) -> Search[list[Sample]]:
        fresh = [schedule for schedule in dict.fromkeys(asked) if schedule not in memory]
        if fresh:
            memory.update(zip(fresh, (yield fresh), strict=True))
        return [memory[schedule] for schedule in asked]

    return relayed(search, answer)


def _cycles_for_each_product(kernel: MicroKernel) -> float:
    return kernel_cycles_per_vector_row(kernel) / (kernel.mr * kernel.panels)


def _scale_up(alone: ScheduleSpace, kernel: MicroKernel, gain: float) -> Search[Sample]:
    """Grow the slice by one rung along the best axis while that gains."""
    (best,) = yield [alone.smallest(kernel, ThreadGrid(1, 1, 1))]
    while larger := _larger_by_a_rung(alone, best.schedule):
        grown = fastest((yield larger))
        if grown.estimate_ns * (1 + gain) >= best.estimate_ns:
            break
        best = grown
    return best


def _larger_by_a_rung(alone: ScheduleSpace, schedule: Schedule) -> list[Schedule]:
    grown = []
    for axis in AXES:
        above = [rung for rung in alone.ladder(axis, schedule) if rung > getattr(schedule, axis)]
        grown += [resized(schedule, axis, rung) for rung in above[:1]]
    return grown


def _scaled_out(space: ScheduleSpace, schedule: Schedule) -> Schedule:
    """The slice on the grid whose busiest thread has the fewest repetitions of it, were slices never cut."""
    m, n = pieces(space.problem.m, schedule.block_m), pieces(space.problem.n, schedule.block_n)
    grids = space.grids(kernel_of(schedule))
    fewest = min(grids, key=lambda grid: pieces(m, grid.m) * pieces(n, grid.n) / grid.k)
    return space.regridded(schedule, fewest)
