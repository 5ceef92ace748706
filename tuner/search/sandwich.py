"""Sandwich's search for one product: fast start, then finetune over thread grids (paper, sections 3.2 and 6).

Slice and grid depend on each other: the best slice for one thread may leave other threads without work, and
the grid limits the slice. So slices first grow while leaving every grid possible, and are finished under each
grid:

- *Screen.* Every micro-kernel is timed once on the cost model's slice for it, side by side. A ranking within
  tens of per cent is enough to drop most kernels, and one batch compares better than many.
- *Fast start.* From one micro-kernel upwards, axes in turn, a size doubles while that gains. The first
  doublings gain so much that nothing finer is worth a measurement. A step without a gain is rolled back and
  its axis is left; no step makes a slice larger than what an axis leaves for each thread.
- *Finetune.* Every grid of all threads, split-K included, is tried on the fast start's and the model's
  slices. Those of the best micro-kernels are tried with every length of a pass over k, whose cost falls in
  cliffs: where a tile's weights fit L1, where one pass is all. The better ones climb by single rungs, up or
  down, over the grid, the loop order and the prefetch distance too, until no neighbour gains or after a few
  moves: later gains are mostly luck.
- *Finals.* The fastest few are timed again side by side, the better half of them several times; only these
  samples choose among them.

Any measured schedule can win, the model's and the caller's seeds included. Cost: one sample for each
micro-kernel, about 15 for each fast start, 25 for lines over k, 15 for each climb and 20 for the finals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.protocol import (
    Search,
    SearchOptions,
    cost,
    fastest,
    referenced,
    side_by_side,
    together,
)
from phasewise.tuner.search.space import (
    AXES,
    Axis,
    MicroKernel,
    ScheduleSpace,
    grid_of,
    kernel_of,
    model_schedule,
    pieces,
    resized,
)


def sandwich(
    space: ScheduleSpace, options: SearchOptions, seeds: Sequence[Schedule] = ()
) -> Search[Schedule]:
    """Search one product. `seeds`: schedules to begin with besides the model's, e.g. of a similar product."""
    samples = yield from sandwich_samples(space, options, seeds)
    finalists = yield from qualified([sample.schedule for sample in samples], options)
    return fastest((yield from side_by_side(finalists, options.final_laps))).schedule


def qualified(ranked: Sequence[Schedule], options: SearchOptions) -> Search[list[Schedule]]:
    """The finalists, fastest first: the better half of twice as many, timed once more side by side, since
    samples taken one after another rank the fastest badly on a busy machine."""
    few = ranked[: 2 * options.finals]
    samples = yield list(few)
    return [sample.schedule for sample in sorted(samples, key=cost)[: options.finals]]


def sandwich_samples(
    space: ScheduleSpace, options: SearchOptions, seeds: Sequence[Schedule] = ()
) -> Search[list[Sample]]:
    """Search one product as `sandwich` does without the finals; returns all samples, fastest first."""
    by_schedule: dict[Schedule, Sample] = {}
    yield from referenced(_phases(space, options, seeds), by_schedule, options.batch)
    return sorted(by_schedule.values(), key=cost)


def _phases(space: ScheduleSpace, options: SearchOptions, seeds: Sequence[Schedule]) -> Search[None]:
    seeds = [space.fitted(seed) for seed in seeds]
    screened = yield from _screen(space, seeds)
    kept = _within(screened, options.keep_within)[: options.kept_kernels]
    starts = [_start(space, sample.schedule, seeds) for sample in kept]
    grown = yield from together([fast_start(space, start, options) for start in starts])
    slices = yield from _on_best_grids(space, [*kept, *grown])
    fastest_kernels = [kernel_of(sample.schedule) for sample in _of_each_kernel(slices)][: options.lines]
    candidates = [sample for sample in slices if kernel_of(sample.schedule) in fastest_kernels]
    candidates = yield from _every_pass(space, candidates)
    yield from together([climb(space, sample, options) for sample in candidates[: options.finalists]])


def _every_pass(space: ScheduleSpace, samples: Sequence[Sample]) -> Search[list[Sample]]:
    """Time every slice with every length of a pass over k; returns each slice's fastest sample, fastest
    first. All lengths are timed, because a pass's cost falls in cliffs: where a tile's weights fit L1, and
    where one pass is all and no sums are stored."""
    lines = [
        [
            space.fitted(resized(sample.schedule, "block_k", size))
            for size in space.ladder("block_k", sample.schedule)
        ]
        for sample in samples
    ]
    return sorted((yield from _fastest_of_each(lines)), key=cost)


def _screen(space: ScheduleSpace, seeds: Sequence[Schedule]) -> Search[list[Sample]]:
    """The best sample of every micro-kernel, fastest first; kernels most like a seed's are timed first."""
    seeded = [kernel_of(seed) for seed in seeds]

    def unlike(kernel: MicroKernel) -> float:
        return min((kernel.unlike(other) for other in seeded), default=0.0)

    first = [model_schedule(space, kernel) for kernel in sorted(space.kernels, key=unlike)]
    return _of_each_kernel((yield [*seeds, *first]))


def _within(samples: Sequence[Sample], share: float) -> list[Sample]:
    """The samples within a share of the fastest one, fastest first."""
    ranked = sorted(samples, key=cost)
    return [sample for sample in ranked if sample.estimate_ns <= (1 + share) * ranked[0].estimate_ns]


def _of_each_kernel(samples: Sequence[Sample]) -> list[Sample]:
    """The fastest sample of every micro-kernel, fastest first."""
    best: dict[MicroKernel, Sample] = {}
    for sample in sorted(samples, key=cost):
        best.setdefault(kernel_of(sample.schedule), sample)
    return list(best.values())


def _start(space: ScheduleSpace, screened: Schedule, seeds: Sequence[Schedule]) -> Schedule:
    """The schedule that begins a kernel's fast start: one tile, or a seed that was the best of its kernel."""
    return screened if screened in seeds else space.smallest(kernel_of(screened), grid_of(screened))


def fast_start(space: ScheduleSpace, start: Schedule, options: SearchOptions) -> Search[Sample]:
    """Double the slice along the axes in turn, as long as each gains; returns the best sample."""
    (best,) = yield [start]
    growing = list(AXES)
    while growing:
        for axis in list(growing):
            larger = _doubled(space, best.schedule, axis)
            if larger is None:
                growing.remove(axis)
                continue
            (sample,) = yield [larger]
            if _gains(sample, best, options.gain):
                best = sample
            else:
                growing.remove(axis)
    return best


def _doubled(space: ScheduleSpace, schedule: Schedule, axis: Axis) -> Schedule | None:
    """The slice with one side about doubled; None where the axis would leave threads without work."""
    size, limit = getattr(schedule, axis), parallel_limit(space, schedule, axis)
    larger = [rung for rung in space.ladder(axis, schedule) if size < rung <= min(2 * size, limit)]
    return space.fitted(resized(schedule, axis, larger[-1])) if larger else None


def parallel_limit(space: ScheduleSpace, schedule: Schedule, axis: Axis) -> int:
    """The longest side that leaves a slice of the product for every thread along this axis. For (m, n, k) =
    (128, 64, 64) and two threads: (64, 32, 32). k can be cut only into its parts."""
    if axis == "block_k":
        return space.region(grid_of(schedule), kernel_of(schedule)).inputs
    unit, extent = (schedule.mr, space.problem.m) if axis == "block_m" else (schedule.nr, space.problem.n)
    return unit * max(1, pieces(extent, unit) // space.threads)


def _on_best_grids(space: ScheduleSpace, samples: Sequence[Sample]) -> Search[list[Sample]]:
    """Time each slice under every grid of all threads; returns the fastest sample of each slice."""
    spread = [
        [space.regridded(sample.schedule, grid) for grid in space.grids(kernel_of(sample.schedule))]
        for sample in samples
    ]
    return (yield from _fastest_of_each(spread))


def _fastest_of_each(groups: Sequence[Sequence[Schedule]]) -> Search[list[Sample]]:
    every = list(dict.fromkeys(schedule for group in groups for schedule in group))
    timed = dict(zip(every, (yield every), strict=True))
    return [fastest([timed[schedule] for schedule in group]) for group in groups]


def _whole(space: ScheduleSpace, schedule: Schedule, axis: Axis) -> Schedule:
    """The slice that takes all of its region along an axis."""
    return space.fitted(resized(schedule, axis, space.ladder(axis, schedule)[-1]))


def climb(space: ScheduleSpace, start: Sample, options: SearchOptions) -> Search[Sample]:
    """Move to the best neighbour while one gains, at most `moves` times; without a gain, look up to
    `patience` rungs away. Returns the best sample."""
    best, distance, moves = start, 1, 0
    while distance <= options.patience and moves < options.moves:
        samples = yield neighbours(space, best.schedule, distance)
        quickest = fastest([best, *samples])
        if _gains(quickest, best, options.fine_gain):
            best, distance, moves = quickest, 1, moves + 1
        else:
            distance += 1
    return best


def neighbours(space: ScheduleSpace, schedule: Schedule, distance: int = 1) -> list[Schedule]:
    """The schedules that differ by `distance` rungs in one number, in the grid, or in the loop order, and
    those with all of an axis in one piece, since the last cut's cost shows on no rung below."""
    moved = [
        resized(schedule, axis, size)
        for axis in AXES
        for size in _beside(space.ladder(axis, schedule), getattr(schedule, axis), distance)
    ]
    moved += [_whole(space, schedule, axis) for axis in AXES]
    moved += [
        replace(schedule, prefetch_bytes=ahead)
        for ahead in _beside(space.prefetches, schedule.prefetch_bytes, distance)
    ]
    moved += [replace(schedule, loop_order=order) for order in space.orders]
    moved += [space.regridded(schedule, grid) for grid in space.grids(kernel_of(schedule))]
    fitted = dict.fromkeys(space.fitted(other) for other in moved)
    return [other for other in fitted if other != schedule]


def _beside(rungs: Sequence[int], value: int, distance: int) -> list[int]:
    """The rungs `distance` below and above a value, which need not be a rung itself."""
    below = [rung for rung in rungs if rung < value][-distance:]
    above = [rung for rung in rungs if rung > value][:distance]
    return [side[end] for side, end in ((below, 0), (above, -1)) if len(side) == distance]


def _gains(sample: Sample, best: Sample, share: float) -> bool:
    return sample.estimate_ns * (1 + share) < best.estimate_ns
