"""Fig. 8 of the Sandwich paper: searches for kernels beside each other on real kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Row, Threads, Yielded, cores_of, listed, note, numbers, shapes
from benchmarks.papers.rounds import Times, against_best, halved, shuffled_rounds
from phasewise.kerneldb.records import Sample, Schedule
from phasewise.topology import read_machine
from phasewise.tuner.native import NativeEvaluator, core_caches, group_of
from phasewise.tuner.search.protocol import (
    Search,
    SearchOptions,
    cost,
    drive,
    fastest,
    referenced,
    side_by_side,
)
from phasewise.tuner.search.sandwich import qualified, sandwich
from phasewise.tuner.search.space import ScheduleSpace, kernel_cycles_per_vector_row, kernel_of
from phasewise.tuner.weights import cold_bytes
from tests.support.searches import every_schedule, holds, mikpoly, random, roller

ROUNDS = 150
RANDOM_COUNT = 60
HEAT, HEAT_ROUNDS = 32, 3
RACED = 128
"""Number of the exhaustive search's fastest that begin the race for the oracle .."""
ORACLES = 8
""".. and number that run in the rounds."""
WITHIN = (0.03, 0.05, 0.1, 0.2)
FINALS_OF_THEIR_OWN = ("sandwich", "mikpoly")
"""MikPoly asks its model and compares nothing."""


@dataclass(frozen=True)
class Look:
    """One run of a search: its work and its choice."""

    search: str
    timed: int
    seconds: float
    chosen: Schedule
    trace: list[tuple[float, Schedule]]
    """Seconds, and the fastest so far."""


def all_searches(space: ScheduleSpace, default: Schedule) -> dict[str, Search[Schedule]]:
    return {
        "sandwich": sandwich(space, SearchOptions(), [default]),
        "roller": roller(space),
        "mikpoly": mikpoly(space),
        "random": random(space, RANDOM_COUNT),
    }


def thinned(space: ScheduleSpace, limit: int, default: Schedule) -> ScheduleSpace:
    """One prefetch distance, the default's; as often as needed every second kernel, but for the default's.

    The others stand in the order of their work a cycle, so that good and bad ones stay.
    """
    own = kernel_of(default)
    others = sorted(
        (kernel for kernel in space.kernels if kernel != own),
        key=lambda kernel: kernel_cycles_per_vector_row(kernel) / (kernel.mr * kernel.panels),
    )
    space = replace(space, prefetches=(default.prefetch_bytes,), kernels=(own, *others))
    while count(space) > limit and len(space.kernels) > 2:
        space = replace(space, kernels=(own, *space.kernels[1::2]))
    return space


def count(space: ScheduleSpace) -> int:
    return sum(1 for _ in every_schedule(space))


@dataclass(frozen=True)
class Arena:
    """One product: who times it, its candidates, the kernels' own schedule."""

    evaluator: NativeEvaluator
    space: ScheduleSpace
    default: Schedule

    def look(self, name: str, search: Search[Schedule]) -> Look:
        """Drive a search, and its finals if it has none of its own."""
        sampled: dict[Schedule, Sample] = {}
        trace: list[tuple[float, Schedule]] = []
        timed, started_s = 0, time.perf_counter()

        def measure(schedules: Sequence[Schedule]) -> list[Sample]:
            nonlocal timed
            timed += len(schedules)
            samples = self.evaluator.measure(self.space.problem, schedules)
            trace.append((time.perf_counter() - started_s, fastest(samples).schedule))
            return samples

        if name in FINALS_OF_THEIR_OWN:
            chosen = drive(search, measure)
        else:
            drive(referenced(search, sampled, SearchOptions().batch), measure)
            chosen = drive(_finals(self._of_this_product(sampled)), measure)
        return Look(name, timed, time.perf_counter() - started_s, chosen, trace)

    def _of_this_product(self, sampled: dict[Schedule, Sample]) -> list[Sample]:
        """Without Roller's trials on one thread."""
        return [sample for sample in sampled.values() if holds(self.space, sample.schedule)]

    def oracles(self) -> tuple[list[Schedule], str]:
        """The few fastest of all candidates, after a race of the fastest ones."""
        every, costs = list(every_schedule(self.space)), {}
        Random(0).shuffle(every)
        for start in range(0, len(every), HEAT):
            heat = every[start : start + HEAT]
            times = self.rounds([self.default, *heat], HEAT_ROUNDS)
            beside = np.median(times[:, 1:] / times[:, :1], axis=0)
            costs.update(zip(heat, map(float, beside), strict=True))
        few = halved(sorted(costs, key=lambda schedule: costs[schedule])[:RACED], self.rounds, ORACLES)
        shares = (
            statistics.fmean(cost <= (1 + share) * costs[few[0]] for cost in costs.values())
            for share in WITHIN
        )
        within = ", ".join(
            f"{part:.1%} within {share:.0%}" for part, share in zip(shares, WITHIN, strict=True)
        )
        return few, f"of {len(every)} candidates {within}"

    def rounds(self, schedules: Sequence[Schedule], rounds: int) -> Times:
        return shuffled_rounds(self.evaluator.takes(self.space.problem, schedules), rounds)


def _finals(samples: Sequence[Sample]) -> Search[Schedule]:
    """As sandwich's."""
    options = SearchOptions()
    few = yield from qualified([sample.schedule for sample in sorted(samples, key=cost)], options)
    return fastest((yield from side_by_side(few, options.final_laps))).schedule


def compare(arena: Arena, repeats: int, oracle: bool) -> tuple[list[Row], str]:
    """Run every search on one product, then all that they chose in rounds with the oracle."""
    looks = [
        arena.look(name, search)
        for _ in range(repeats)
        for name, search in all_searches(arena.space, arena.default).items()
    ]
    oracles, flatness = arena.oracles() if oracle else ([], "")
    everyone = list(dict.fromkeys([arena.default, *(look.chosen for look in looks), *oracles]))
    times = arena.rounds(everyone, ROUNDS)
    standings = [*looks, Look("default", 0, 0.0, arena.default, [])]
    return [_row(arena, look, times, everyone.index(look.chosen)) for look in standings], flatness


def _row(arena: Arena, look: Look, times: Times, column: int) -> Row:
    problem = arena.space.problem
    over_best = against_best(times, column, range(times.shape[1]))
    return {
        "format": problem.format,
        "n": problem.n,
        "k": problem.k,
        "m": problem.m,
        "search": look.search,
        "candidates": count(arena.space),
        "timed": look.timed,
        "tuning, s": look.seconds,
        "us": statistics.median(times[:, column]) / 1e3,
        "of the best's speed": 1 / over_best.middle,
        "95 %": f"{1 / over_best.high:.1%} to {1 / over_best.low:.1%}",
    }


def summaries(rows: Sequence[Row]) -> list[Row]:
    """A row for each search, over all products."""
    summary_rows = []
    for name in dict.fromkeys(row["search"] for row in rows):
        own = [row for row in rows if row["search"] == name]
        shares = [float(str(row["of the best's speed"])) for row in own]
        timed = [int(str(row["timed"])) / int(str(row["candidates"])) for row in own]
        seconds = [float(str(row["tuning, s"])) for row in own]
        summary_rows.append(
            {
                "search": name,
                "of the best's speed, geometric mean": f"{statistics.geometric_mean(shares):.1%}",
                "worst": f"{min(shares):.1%}",
                "timed, mean": f"{statistics.fmean(timed):.1%}",
                "at most": f"{max(timed):.1%}",
                "tuning, s, mean": statistics.fmean(seconds),
            }
        )
    return summary_rows


def searches(
    formats: Annotated[str, Option("--format")] = "f32,bf16,int4m",
    shape: Annotated[str, Option(help="n,k;n,k;..")] = "576,1536",
    m: str = "1,16,128",
    threads: Threads = 2,
    repeats: Annotated[int, Option(help="of every search but the exhaustive one")] = 3,
    oracle_limit: Annotated[int, Option(help="0: all candidates, no oracle")] = 0,
) -> Yielded:
    """The searches beside each other on real kernels: how fast is what they find, at what cost?

        python benchmarks/figures.py searches --format f32,int8 --shape 576,1536 --m 16 --oracle-limit 2000

    Every search gets the same candidates and times them by itself, several times over (schedules and seconds
    are counted). Sandwich begins with the kernels' own default among its seeds, as when it tunes, and ends
    with timing its fastest few again side by side; Roller and random get the same end, MikPoly asks its
    model alone, as there. What they chose, and the kernels' own default, then run side by side in many short
    rounds, each in another order; a schedule counts by the median over rounds of its time over the best's in
    the same round, with a 95 % interval.

    With --oracle-limit the candidates are thinned to at most that number, and all of them are timed, in
    heats with the default in each round. The fastest of these race one another until a few are left
    (successive halving), and these run in the rounds too. The best schedule of the rounds is the oracle,
    no matter which search found it: one half of the rounds chooses it, the other half judges it, so that
    luck is not rewarded.
    """
    machine, cores = read_machine(), cores_of(threads)
    caches, rows = core_caches(machine, cores), []
    with closing(NativeEvaluator(cores, cold_bytes(machine))) as evaluator:
        for name, n, k in [(name, n, k) for name in listed(formats) for n, k in shapes(shape)]:
            group = group_of(name, n, k, threads, caches)
            for n_rows in numbers(m):
                space = group.space(n_rows, group.arithmetics[0])
                default = space.fitted(group.default(n_rows))
                if oracle_limit:
                    space = thinned(space, oracle_limit, default)
                arena = Arena(evaluator, space, default)
                note(f"{name} {n} x {k}, m = {n_rows}")
                own, flatness = compare(arena, repeats, bool(oracle_limit))
                rows += own
                yield from own
                if flatness:
                    yield f"{name} {n} x {k}, m = {n_rows}: {flatness}."
    yield from summaries(rows)
