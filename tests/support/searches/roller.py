"""A search in the manner of Roller: scale up on one core, then scale out (Zhu et al., OSDI 2022).

Roller looks for the slice that one core likes best and repeats it over all cores. It steps evenly, one unit
of the hardware at a time, and never asks what a slice leaves for the other cores; that is where it falls
behind on shapes with few slices (Sandwich, section 3.2). Here, over the same candidates as the other
searches:

- *Scale up.* From the micro-kernels that keep the units busiest, the slice grows one rung at a time along the
  axis that gains most, timed on one thread.
- *Scale out.* The few fastest slices are cut over all threads, on the grid that leaves the slowest thread the
  fewest of them. The faster whole product wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.protocol import Search, T, cost, fastest, relayed, together
from phasewise.tuner.search.space import (
    AXES,
    MicroKernel,
    ScheduleSpace,
    ThreadGrid,
    kernel_cycles_per_vector_row,
    kernel_of,
    pieces,
    resized,
)


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
