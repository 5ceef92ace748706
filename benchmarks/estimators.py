"""Error of estimates of a call's time: one product runs as eight contestants of a race.

    python benchmarks/estimators.py --seconds 10 --neighbours 1

All contestants are the same schedule, so that the spread of their estimates (largest / smallest - 1, median
and 90th percentile over all races) is error: a tuner that prefers one of them is fooled by that much.
`--neighbours` starts as many busy processes on the same cores. Decision 0010 has a run of it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated

from typer import Option

from benchmarks.harness import Yielded, commands, cores_of
from phasewise.cython_kernels import _native
from phasewise.topology import read_machine
from phasewise.tuner import timing
from phasewise.tuner.weights import cold_bytes, copies_of, random_weight

CONTESTANTS = 8
PRODUCTS = (("int4m", 576, 1536, 1), ("bf16", 576, 1536, 64))


def middle_half(samples: Sequence[int]) -> float:
    cut = len(samples) // 4
    return statistics.fmean(sorted(samples)[cut : len(samples) - cut])


ESTIMATES: dict[str, Callable[[Sequence[int]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "middle half": middle_half,
    "fastest quarter": timing.estimate_ns,
    "minimum": min,
}


def spin() -> None:
    while True:
        pass


def turns_of(product: _native.TeamProduct, seconds: float) -> list[timing.Samples]:
    """As many turns as fit into the time."""
    product.time(None, 20)
    turn = timing.plan_turn(int(statistics.median(product.time(None, 20).tolist())))
    turns, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        turns.append(timing.loop_means(product.time(None, turn.calls), turn))
    return turns


def spreads(turns: Sequence[timing.Samples], estimate: Callable[[Sequence[int]], float]) -> list[float]:
    """The spread of estimates in each race; the turns make one race after another."""
    in_race = CONTESTANTS * timing.ROUNDS
    of_races = []
    for start in range(0, len(turns) - in_race + 1, CONTESTANTS):
        race = iter(turns[start : start + in_race])
        taken = timing.race([lambda race=race: next(race)] * CONTESTANTS)  # type: ignore[misc]
        estimates = [estimate(samples) for samples in taken]
        of_races.append(max(estimates) / min(estimates) - 1)
    return of_races


def estimators(
    seconds: float = 10.0, neighbours: Annotated[int, Option(help="busy processes on the same cores")] = 0
) -> Yielded:
    cores = cores_of(os.cpu_count() or 1)
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(neighbours)]
    for neighbour in busy:
        neighbour.start()
    for weight_format, n, k, m in PRODUCTS:
        weights = copies_of(random_weight(weight_format, n, k), cold_bytes(read_machine()))
        turns = turns_of(_native.TeamProduct(_native.Team(cores), weights, m), seconds / len(PRODUCTS))
        for name, estimate in ESTIMATES.items():
            ordered = sorted(spreads(turns, estimate))
            yield {
                "format": weight_format,
                "n x k": f"{n} x {k}",
                "m": m,
                "estimate": name,
                "median spread": f"{statistics.median(ordered):.3f}",
                "P90 spread": f"{ordered[math.floor(0.9 * len(ordered))]:.3f}",
                "races": len(ordered),
            }
    for neighbour in busy:
        neighbour.terminate()


app = commands(__doc__, estimators)

if __name__ == "__main__":
    app()
