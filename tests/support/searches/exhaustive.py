"""Every schedule of a space: the oracle that the searches are held against, for spaces small enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.protocol import Search, fastest
from phasewise.tuner.search.space import AXES, ScheduleSpace, grid_of, kernel_of, resized

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
