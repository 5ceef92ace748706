"""Does a neighbour's schedule ever lose to the default? Where a database has tuned some m, try those between.

    python benchmarks/neighbours.py [--db DB] [--threads 2] [--most 40] [--json]

For each m that was tuned for a weight, the m farthest from it to which lookup gives its schedule runs with
that in a paired duel with the kernels' own default; a gain above 1 means that the neighbour's is faster. It
loses only if the whole confidence interval lies below 1.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Annotated

from typer import Option

from benchmarks.harness import Threads, Yielded, commands, cores_of
from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.lookup import ScheduleChoice, ScheduleTable
from phasewise.tuner.native import NativeEvaluator, is_default_for
from phasewise.tuner.plans import machine_key
from phasewise.tuner.weights import cold_bytes


def between_tuned(
    problems: Sequence[Problem], table: ScheduleTable
) -> Iterator[tuple[Problem, Schedule, str]]:
    """Products between two tuned m of a weight, as far from one of them as a neighbour may be."""
    for first, second in itertools.pairwise(problems):
        key = (second.family, second.format, second.n, second.k)
        if key != (first.family, first.format, first.n, first.k) or second.family != "gemm":
            continue
        between = [(m, table.choice(key, m)) for m in range(first.m + 1, second.m)]
        near = [(m, choice) for m, choice in between if choice.kind == "neighbour"]
        ends = [pair for side in (first.m, second.m) for pair in _farthest(near, side)]
        for m, choice in ends:
            if choice.schedule is not None:
                yield Problem(*key, m), choice.schedule, choice.why


def _farthest(near: Sequence[tuple[int, ScheduleChoice]], tuned: int) -> Sequence[tuple[int, ScheduleChoice]]:
    """The one farthest from a tuned m among those that run with its schedule; none if there are none."""
    own = [(m, choice) for m, choice in near if choice.why.endswith(f"m={tuned}")]
    return sorted(own, key=lambda pair: abs(pair[0] - tuned))[-1:]


def neighbours(
    db: Annotated[str | None, Option()] = None,
    threads: Threads = 2,
    most: Annotated[int, Option(help="most values of m, spread evenly over all")] = 40,
) -> Yielded:
    machine, cores = read_machine(), cores_of(threads)
    abi = _native.kernel_abi("gemm")
    with open_store(db) as store:
        promoted = store.promoted_measurements(machine_key(machine, cores))
        in_use = [row for row in promoted if row.kernel_abi == abi]
    table = ScheduleTable(in_use, is_default_for(len(cores)))
    between = list(between_tuned([row.problem for row in in_use], table))
    if not between:
        raise SystemExit(
            "no two near m of one weight are tuned for these cores; run phasewise tune-kernels first"
        )
    gains, losses = [], 0
    with closing(NativeEvaluator(cores, cold_bytes(machine))) as evaluator:
        for problem, schedule, why in between[:: -(-len(between) // most)]:
            comparison = evaluator.compare(problem, schedule, None)
            gains.append(comparison.gain)
            losses += comparison.gain_high < 1.0
            yield {
                "format": problem.format,
                "n x k": f"{problem.n} x {problem.k}",
                "m": problem.m,
                "runs with": why,
                "gain over the default": f"{comparison.gain:.3f}",
                "interval": f"{comparison.gain_low:.3f} to {comparison.gain_high:.3f}",
                "loses": comparison.gain_high < 1.0,
            }
    mean = statistics.geometric_mean(gains)
    yield f"{len(gains)} m between tuned ones: gain {mean:.3f} in the geometric mean, {losses} lose."


app = commands(__doc__, neighbours)

if __name__ == "__main__":
    app()
