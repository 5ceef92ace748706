"""The search of one weight's products, from one row to many, each m learning from the previous ones (paper,
section 6).

Three methods make a group cheaper than its products:

- *Sliding window.* Up to m = sigma, any micro-kernel may win and all are screened. Later the candidates are
  those of the last sigma winners, and kernels taller than all rows of the m before, which had no chance yet.
  Every candidate brings the slice with which it won last as a seed, so that fast starts are short.
- *Reuse.* From `reuse_from` on, shapes are no longer skinny. Once `steady` of them in a row confirm the slice
  (the found slice is near the average of the last ones, or theirs is as fast), it is fixed: larger m only
  time it, fitted to their rows, with twice the rows and in both orders of loops, beside the default. Where
  the default beats it, the search is resumed.
- *Cache.* A group's results are seeds for each m of later groups.

The m are all up to sigma, where one row more can mean another micro-kernel, then `per_octave` of each octave;
an m between two of them differs from the nearer by at most an eighth and uses its schedule.

First the arithmetic is chosen, once: it decides the bits of results, so it must be the same for every m, and
so in both phases. A few m are probed on default-like schedules. The default arithmetic stays unless another
is clearly faster over all of them (two per cent are not worth other bits), and none is taken that slows the
fewest rows down: what prompts gain does not make up for slow answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from phasewise.kerneldb.records import PANEL_COLUMNS, Problem, Sample, Schedule
from phasewise.tuner.search.protocol import (
    GroupSearch,
    Search,
    SearchOptions,
    T,
    TimingBatch,
    cost,
    fastest,
    referenced,
    relayed,
    side_by_side,
)
from phasewise.tuner.search.sandwich import qualified, sandwich_samples
from phasewise.tuner.search.space import (
    AXES,
    Arithmetic,
    Caches,
    MicroKernel,
    ScheduleSpace,
    fitting,
    grid_of,
    kernel_of,
    model_schedule,
    modelled_cycles,
    pieces,
)

PROBED_KERNELS = 4
"""Schedules of each arithmetic to probe besides the default; with fewer, luck would decide."""

_Products: TypeAlias = Generator[tuple[int, list[Schedule]], list[Sample], T]
"""A search of one product after another, m by m."""


@dataclass(frozen=True)
class Group:
    """One weight on some threads, with all that searches know about it."""

    format: str
    n: int
    k: int
    threads: int
    arithmetics: tuple[Arithmetic, ...]
    """The arithmetics of the weight, the default first, all of one accuracy class: only speed decides."""
    kernels: Mapping[str, tuple[MicroKernel, ...]]
    """The micro-kernels that exist, by compute path."""
    caches: Caches
    weight_bits: int
    default: Callable[[int], Schedule]
    """The engine's own schedule for a number of rows, of whose arithmetics only the group's is used."""
    family: str = "gemm"

    def space(self, m: int, arithmetic: Arithmetic) -> ScheduleSpace:
        """The schedules of the product of m rows, with every kernel that may be fast for it."""
        return ScheduleSpace(
            problem=Problem(self.family, self.format, self.n, self.k, m),
            arithmetic=arithmetic,
            threads=self.threads,
            kernels=fitting(self.kernels[arithmetic.compute_path], m),
            caches=self.caches,
            weight_bits=self.weight_bits,
        )


@dataclass(frozen=True)
class GroupOutcome:
    arithmetic: Arithmetic
    best: Mapping[int, Schedule]
    """The fastest schedule of each m, in the order of the search."""
    reused: tuple[int, ...]
    """The m that took a fixed slice instead of a search of their own."""


@dataclass
class ScheduleCache:
    """The results of earlier groups, by family, format, arithmetic, threads and m."""

    seeds_by_key: dict[tuple[str, str, Arithmetic, int, int], list[Schedule]] = field(default_factory=dict)

    def seeds(self, group: Group, arithmetic: Arithmetic, m: int) -> list[Schedule]:
        return self.seeds_by_key.get((group.family, group.format, arithmetic, group.threads, m), [])

    def offer(self, group: Group, m: int, schedules: Sequence[Schedule]) -> None:
        """Keep these schedules as seeds for m, behind earlier groups' seeds, each for its arithmetic."""
        for schedule in schedules:
            arithmetic = Arithmetic(schedule.compute_path, schedule.k_parts)
            key = (group.family, group.format, arithmetic, group.threads, m)
            if schedule.threads == group.threads and arithmetic in group.arithmetics:
                seed = adopted(schedule, group.kernels[arithmetic.compute_path])
                self.seeds_by_key[key] = [*self.seeds_by_key.get(key, []), seed]

    def add(self, group: Group, outcome: GroupOutcome) -> None:
        """Keep a group's results as seeds, before those of earlier groups; for each m two are kept."""
        for m, schedule in outcome.best.items():
            key = (group.family, group.format, outcome.arithmetic, group.threads, m)
            self.seeds_by_key[key] = [schedule, *self.seeds_by_key.get(key, [])][:2]


def m_grid(max_m: int, options: SearchOptions) -> tuple[int, ...]:
    """The m to tune: 1, 2, .., sigma, then `per_octave` of each octave, and `max_m`."""
    grid = list(range(1, min(options.window, max_m) + 1))
    octave = options.window
    while grid[-1] < max_m:
        grid += [
            octave * (options.per_octave + step) // options.per_octave
            for step in range(1, options.per_octave + 1)
        ]
        octave *= 2
    return tuple(dict.fromkeys(min(m, max_m) for m in grid))


def tune_group(
    group: Group, ms: Sequence[int], options: SearchOptions, cache: ScheduleCache | None = None
) -> GroupSearch[GroupOutcome]:
    """Search the group's products for the ascending `ms`. `cache`: the results of other groups."""
    cache = ScheduleCache() if cache is None else cache
    takes = Counter[tuple[int, Schedule]]()

    def answer(batch: tuple[int, list[Schedule]]) -> GroupSearch[list[Sample]]:
        m, asked = batch
        ask = TimingBatch(m, tuple(asked), tuple(takes[m, schedule] for schedule in asked))
        takes.update((m, schedule) for schedule in asked)
        return (yield ask)

    return relayed(_search_group(group, ms, options, cache), answer)


def _search_group(
    group: Group, ms: Sequence[int], options: SearchOptions, cache: ScheduleCache
) -> _Products[GroupOutcome]:
    arithmetic = yield from _choose_arithmetic(group, ms, options)
    history = _History(options)
    for m in ms:
        space = group.space(m, arithmetic)
        default = space.fitted(group.default(m))
        if history.is_fixed:
            yield from _at(m, _reuse(history, space, default))
        if not history.is_fixed:
            seeds = [*cache.seeds(group, arithmetic, m), default, *history.seeds(space)]
            search = sandwich_samples(replace(space, kernels=history.candidates(space)), options, seeds)
            ranking = yield from _at(m, search)
            yield from _at(m, _settle(history, space, default, [sample.schedule for sample in ranking]))
    return GroupOutcome(arithmetic, history.winners, tuple(history.reused))


def _reuse(history: _History, space: ScheduleSpace, default: Schedule) -> Search[None]:
    """Time the fixed slice, also with more rows or another loop order; give it up if the default beats it."""
    fixed = history.transferred(space)
    taller = space.fitted(replace(fixed, block_m=2 * fixed.block_m))
    others = [
        space.fitted(replace(schedule, loop_order=order))
        for order in space.orders
        for schedule in (fixed, taller)
    ]
    samples = yield list(dict.fromkeys((fixed, *others, default)))
    of_default = next(sample for sample in samples if sample.schedule == default)
    best = fastest([samples[0], *(sample for sample in samples if sample is not of_default)])
    if cost(best) > (1 + history.options.reuse_within) * cost(of_default):
        history.confirmed = 0
        return
    stays = cost(samples[0]) <= (1 + history.options.stay_within) * cost(best)
    history.add(space, fixed if stays else best.schedule)
    history.reused.append(space.problem.m)


def _settle(
    history: _History, space: ScheduleSpace, default: Schedule, ranked: Sequence[Schedule]
) -> Search[None]:
    """Time the fastest few again, side by side with the default and the previous slice; the fastest wins.
    Only the new samples count, since the winner's first sample was lucky. On a plateau the slice stays as it
    was, so that it can become steady."""
    finalists = list(dict.fromkeys([default, *(yield from qualified(ranked, history.options))]))
    if not history.winners:
        history.add(space, fastest((yield from side_by_side(finalists, history.options.final_laps))).schedule)
        return
    previous = history.transferred(space)
    samples = yield from side_by_side(list(dict.fromkeys((previous, *finalists))), history.options.final_laps)
    best = fastest(samples)
    history.confirm(space, best, previous_cost=cost(samples[0]))
    stays = cost(samples[0]) <= (1 + history.options.stay_within) * cost(best)
    history.add(space, previous if stays else best.schedule)


def _choose_arithmetic(group: Group, ms: Sequence[int], options: SearchOptions) -> _Products[Arithmetic]:
    """The arithmetic whose best probes are fastest, in the geometric mean over a few m, among those that are
    fast enough for the fewest rows."""
    default = group.arithmetics[0]
    if len(group.arithmetics) == 1:
        return default
    probed = _spread(ms, options.probes)
    log_ns = dict.fromkeys(group.arithmetics, 0.0)
    fewest_ns: dict[Arithmetic, float] = {}
    for m in probed:
        probes = {arithmetic: _probes(group, m, arithmetic) for arithmetic in group.arithmetics}
        samples: dict[Schedule, Sample] = {}
        yield from _at(m, referenced(_each(probes.values()), samples, options.batch))
        for arithmetic, schedules in probes.items():
            best_ns = min(cost(samples[probe]) for probe in schedules)
            fewest_ns.setdefault(arithmetic, best_ns)
            log_ns[arithmetic] += math.log(best_ns) / len(probed)

    def handicapped(arithmetic: Arithmetic) -> float:
        split = options.split_gain if arithmetic.k_parts != default.k_parts else 0.0
        other = options.switch_gain if arithmetic != default else 0.0
        return log_ns[arithmetic] + math.log1p(max(split, other))

    fast_enough = [
        arithmetic
        for arithmetic in group.arithmetics
        if options.fewest_rows_keep * fewest_ns[arithmetic] <= fewest_ns[default]
    ]
    return min(fast_enough, key=handicapped)


def _each(batches: Iterable[list[Schedule]]) -> Search[list[Sample]]:
    return (yield [schedule for batch in batches for schedule in batch])


def _probes(group: Group, m: int, arithmetic: Arithmetic) -> list[Schedule]:
    """The schedules by which an arithmetic is judged: the default, the model's best, and with threads on
    parts of k if possible."""
    space = group.space(m, arithmetic)
    modelled = [
        space.regridded(model_schedule(space, kernel), grid)
        for kernel in space.kernels
        for grid in space.grids(kernel)
        if grid.k == arithmetic.k_parts
    ]
    modelled.sort(key=lambda schedule: modelled_cycles(space, schedule))
    return list(dict.fromkeys([space.fitted(group.default(m)), *modelled[:PROBED_KERNELS]]))


def _spread(ms: Sequence[int], count: int) -> list[int]:
    """About `count` of the ms, from first to last at even ratios."""
    wanted = [ms[0] * (ms[-1] / ms[0]) ** (i / max(1, count - 1)) for i in range(count)]
    return list(dict.fromkeys(min(ms, key=lambda m: abs(math.log(m / want))) for want in wanted))


def _at(m: int, search: Search[T]) -> _Products[T]:
    """The search of one product as a part of a group's search."""

    def answer(asked: list[Schedule]) -> _Products[list[Sample]]:
        return (yield m, asked)

    return relayed(search, answer)


def transfer(schedule: Schedule, space: ScheduleSpace) -> Schedule:
    """A schedule of another m for this product: the same slice repeated, on even tiles of rows."""
    kernel = balanced(space, kernel_of(schedule))
    rows = pieces(schedule.block_m, schedule.mr) * kernel.mr
    moved = replace(schedule, mr=kernel.mr, block_m=rows)
    grids = space.grids(kernel)
    if grid_of(moved) in grids:
        return space.fitted(moved)
    return min(
        (space.regridded(moved, grid) for grid in grids), key=lambda other: modelled_cycles(space, other)
    )


def adopted(schedule: Schedule, kernels: Sequence[MicroKernel]) -> Schedule:
    """The schedule with the most similar kernel that exists here: instruction sets differ in kernels."""
    own = kernel_of(schedule)
    if own in kernels or not kernels:
        return schedule
    near = min(sorted(kernels), key=own.unlike)
    columns = PANEL_COLUMNS * near.panels
    return replace(
        schedule,
        mr=near.mr,
        panels=near.panels,
        block_m=near.mr * pieces(schedule.block_m, near.mr),
        block_n=columns * pieces(schedule.block_n, columns),
    )


def balanced(space: ScheduleSpace, kernel: MicroKernel) -> MicroKernel:
    """The lowest kernel of the same width with as many tiles of rows; without one, the kernel itself."""
    tiles = pieces(space.problem.m, kernel.mr)
    alike = [
        other
        for other in space.kernels
        if other.panels == kernel.panels and pieces(space.problem.m, other.mr) == tiles
    ]
    return min(alike, default=kernel)


@dataclass
class _History:
    """The winners so far, and the number of consecutive winners that confirmed the slice before them."""

    options: SearchOptions
    winners: dict[int, Schedule] = field(default_factory=dict)
    reused: list[int] = field(default_factory=list)
    confirmed: int = 0

    @property
    def is_fixed(self) -> bool:
        return self.confirmed >= self.options.steady

    def add(self, space: ScheduleSpace, winner: Schedule) -> None:
        self.winners[space.problem.m] = winner

    def transferred(self, space: ScheduleSpace) -> Schedule:
        """The last winner, as a schedule of this product."""
        return transfer(self._last(1)[0], space)

    def candidates(self, space: ScheduleSpace) -> tuple[MicroKernel, ...]:
        """The kernels to screen: all while the window fills, then those of recent winners and new ones."""
        if len(self.winners) < self.options.window:
            return space.kernels
        won = [balanced(space, kernel_of(winner)) for winner in self._last(self.options.window)]
        new = [kernel for kernel in space.kernels if kernel.mr > max(self.winners)]
        return tuple(dict.fromkeys([*won, *new]))

    def seeds(self, space: ScheduleSpace) -> list[Schedule]:
        """The schedule with which each kernel of the window won last."""
        last: dict[MicroKernel, Schedule] = {}
        for winner in self._last(self.options.window):
            moved = transfer(winner, space)
            last[kernel_of(moved)] = moved
        return list(last.values())

    def confirm(self, space: ScheduleSpace, best: Sample, previous_cost: int) -> None:
        """Count the shape as steady, or restart the count. Shapes before `reuse_from` do not count."""
        if space.problem.m < self.options.reuse_from:
            return
        as_fast = previous_cost <= (1 + self.options.reuse_within) * cost(best)
        self.confirmed = self.confirmed + 1 if as_fast or self._is_near(best.schedule) else 0

    def _is_near(self, schedule: Schedule) -> bool:
        last = self._last(self.options.steady)
        if any(grid_of(winner) != grid_of(schedule) for winner in last):
            return False
        averages = {axis: sum(getattr(winner, axis) for winner in last) / len(last) for axis in AXES}
        return all(
            abs(getattr(schedule, axis) - average) <= self.options.slice_threshold * average
            for axis, average in averages.items()
        )

    def _last(self, count: int) -> list[Schedule]:
        return list(self.winners.values())[-count:]
