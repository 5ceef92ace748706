"""Table 3 of the Sandwich paper: the sliding window of micro-kernels, over the search of whole groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.harness import Yielded, numbers
from phasewise.kerneldb.records import Schedule
from phasewise.tuner.search.group import Group, m_grid, tune_group
from phasewise.tuner.search.protocol import SearchOptions, drive
from tests.support.machines.landscapes import PLAIN, GroupBench, Landscape, group_of

MOST_ROWS = 512
DECODE, PREFILL = (1, 2, 4, 8), (64, 128, 256, 512)
SHAPES = ((576, 576), (1536, 576), (576, 1536))
"""Products of a layer of the default model."""


Searched = tuple[Mapping[int, Schedule], int, float]
"""By rows the chosen schedule; how many were timed, and their time in ns."""


def windows(
    machines: int = 3, first_seed: int = 0, sizes: str = "1,5,10,16,20", noise: float = 0.02
) -> Yielded:
    """Groups of products tuned from one row to 512 with windows of several sizes, end to end.

    Machines are landscapes of arithmetic (tests/support/machines/landscapes.py), timings scatter by `noise`.
    `timed`: schedules; `timing, s`: what those timings would take, one call each; then the chosen schedules'
    time over the best that any window chose, the geometric mean over the rows of each phase.
    """
    for seed in range(first_seed, first_seed + machines):
        landscape = Landscape(seed, noise)
        searched = {
            size: [_searched(landscape, group_of(*shape), size) for shape in SHAPES]
            for size in numbers(sizes)
        }
        for size, groups in searched.items():
            yield {
                "machine": f"landscape {seed}",
                "window": size,
                "timed": sum(timed for _, timed, _ in groups),
                "timing, s": sum(spent_ns for _, _, spent_ns in groups) / 1e9,
            } | {
                f"{phase} over the best": _over_best(landscape, searched, size, ms)
                for phase, ms in (("decode", DECODE), ("prefill", PREFILL))
            }


def _searched(landscape: Landscape, group: Group, window: int) -> Searched:
    options = replace(SearchOptions(), window=window)
    bench = GroupBench(group, landscape)
    ms = sorted({*m_grid(MOST_ROWS, options), *DECODE, *PREFILL})
    best = drive(tune_group(group, ms, options), bench).best
    return best, bench.timed, sum(float(sample.estimate_ns) for sample in bench.stored.values())


def _over_best(
    landscape: Landscape, searched: Mapping[int, Sequence[Searched]], size: int, ms: tuple[int, ...]
) -> float:
    logs = []
    for number, shape in enumerate(SHAPES):
        group = group_of(*shape)
        for m in ms:
            problem = group.space(m, PLAIN).problem
            chosen = {own: groups[number][0][m] for own, groups in searched.items()}
            costs = {own: landscape.cost_ns(problem, schedule) for own, schedule in chosen.items()}
            logs.append(math.log(costs[size] / min(costs.values())))
    return math.exp(sum(logs) / len(logs))
