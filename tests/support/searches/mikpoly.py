"""A search in the manner of MikPoly: a cost model chooses how micro-kernels fill a shape (Yu et al., ASPLOS
2024).

MikPoly times micro-kernels once and then decides for each shape by arithmetic: the product is a number of
slices, each costs what its micro-kernel was timed at, and the grid takes as many rounds as its busiest core
has slices. Choosing is free, but the model cannot tell schedules apart that cut a product into equally many
slices of equal size, and knows nothing of how slices share caches (Sandwich, section 3.2).

Here: every micro-kernel is timed once, on the slice that half fills the caches; all schedules of the space
are ranked by the model with the kernels' measured rates; the first one is the answer and is timed, but not
compared.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.protocol import Search
from phasewise.tuner.search.space import (
    START_PREFETCH_BYTES,
    ScheduleSpace,
    kernel_of,
    model_schedule,
    modelled_cycles,
)
from tests.support.searches.exhaustive import every_schedule


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
