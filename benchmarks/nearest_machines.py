"""Evaluations to 95 % of the final speed: begun with the nearest core's schedule, and cold.

    python benchmarks/nearest_machines.py [--triples 10]
    python benchmarks/nearest_machines.py --recordings FOLDER     of record_searches.py, on any machine

SIMULATED without --recordings: each triple is three kinds of cores of a seeded cost model
(tests/support/machines/landscapes.py): one, one like it (the same caches, all rates and edges within a fifth
of it), and one that has nothing to do with them. With it, each recording is a kind of core.
Each in turn is new: the nearest of the others, by what `tuner.nearest` compares, gives its winner for the
same product; of recordings only one that gains 2 % there, as one that a duel promotes. The search begins with
it, then times the default schedule. Final speed is that of the cold search's winner. Every evaluation counts.
`share` is of the sums: what a whole tuning run saves. No search needs less than one evaluation, so the last
line leaves the first of each out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Yielded, commands
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.tuner.nearest import CoreFacts, distance
from phasewise.tuner.search.group import adopted
from phasewise.tuner.search.model import model_schedule
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.search.sandwich import sandwich
from phasewise.tuner.search.space import ScheduleSpace
from tests.support.machines.landscapes import Evaluator, Landscape, space_of
from tests.support.machines.recorded_searches import Recording, recordings_in

ROWS = (1, 8, 64, 512)
SHARE = 0.95
PROMOTED = 1.02
"""Least gain over its own default by which a recorded winner would be in use."""


def nearest_machines(
    triples: Annotated[int, Option(help="of kinds of cores")] = 10,
    recordings: Annotated[Path | None, Option(help="folder of recorded searches")] = None,
) -> Yielded:
    if recordings is not None:
        yield from replayed(recordings_in(recordings))
        return
    for m, is_alike in product(ROWS, (True, False)):
        space = space_of(m)
        cold, warm = [], []
        for seed in range(triples):
            kinds = [Landscape(seed), Landscape(seed, unlike=0.2), Landscape(triples + seed)]
            winners = {kind: searched(kind, space, []) for kind in kinds}
            for new in kinds[:2] if is_alike else kinds[2:]:
                donor = min((kind for kind in kinds if kind != new), key=lambda kind: far(new, kind))
                goal_ns = new.cost_ns(space.problem, winners[new][0]) / SHARE
                cold.append(count_to(goal_ns, new, space, winners[new][1]))
                warm.append(count_to(goal_ns, new, space, searched(new, space, [winners[donor][0]])[1]))
        share = statistics.median(warm) / statistics.median(cold)
        yield {
            "m": m,
            "new core": "like one that is known" if is_alike else "like none",
            "cold": statistics.median(cold),
            "nearest": statistics.median(warm),
            "nearest, nine in ten": sorted(warm)[int(0.9 * len(warm))],
            "share": f"{share:.2f}",
        }
    yield f"Medians over {triples} triples of simulated kinds of cores."


def replayed(kinds: Sequence[Recording]) -> Yielded:
    """A row for each new kind of core and number of rows, then one for all."""
    counts_of_all = list[tuple[int, int]]()
    for new in kinds:
        donor = min(
            (kind for kind in kinds if kind is not new), key=lambda kind: distance(new.facts, kind.facts)
        )
        shared = [problem for problem in new.problems if all(problem in kind.problems for kind in kinds)]
        for m, problems in groupby(
            sorted(shared, key=lambda problem: problem.m), key=lambda problem: problem.m
        ):
            counts = [counted_on(new, donor, problem) for problem in problems]
            cold, warm = zip(*counts, strict=True)
            yield {
                "new core": new.name,
                "nearest": donor.name,
                "m": m,
                "products": len(counts),
                "cold": sum(cold),
                "from the nearest": sum(warm),
                "share": f"{sum(warm) / sum(cold):.2f}",
                "most": max(warm),
            }
            counts_of_all += counts
    beyond = [(cold, warm) for cold, warm in counts_of_all if cold > 1]
    yield f"All {len(counts_of_all)} products: {_told(counts_of_all)}"
    yield f"The {len(beyond)} of them whose default schedule is slower than that: {_told(beyond)}"
    yield f"All, beyond the first of each: {_told([(cold - 1, warm - 1) for cold, warm in counts_of_all])}"


def _told(counts: Sequence[tuple[int, int]]) -> str:
    cold, warm = (sum(column) for column in zip(*counts, strict=True))
    return f"{warm} evaluations in place of {cold}, {warm / cold:.2f}"


def counted_on(new: Recording, donor: Recording, problem: Problem) -> tuple[int, int]:
    """Evaluations to SHARE of the final speed: cold, and from the donor's winner.

    A winner that no search from the donor meets counts as all of its evaluations.
    """
    winner, cold = new.search(problem)
    theirs, best = donor.times(problem), donor.search(problem)[0]
    if theirs[donor.default(problem)] < PROMOTED * theirs[best]:
        seeds = []
    else:
        seeds = [adopted(best, new.space(problem).kernels)]
    times = new.times(problem)
    goal_ns = times[winner] / SHARE
    warm = new.search(problem, seeds)[1]
    return _first(times, cold, goal_ns), _first(times, warm, goal_ns)


def _first(times: dict[Schedule, int], asked: Sequence[Schedule], goal_ns: float) -> int:
    """As `count_to`."""
    return next(
        (number for number, schedule in enumerate(asked, 1) if times[schedule] <= goal_ns), len(asked)
    )


def searched(new: Landscape, space: ScheduleSpace, seeds: list[Schedule]) -> tuple[Schedule, list[Schedule]]:
    """The winner, and what was asked for, in this order. The first kernel's model schedule is the default."""
    default = model_schedule(space, space.kernels[0])
    evaluate = Evaluator(new, space.problem)
    return evaluate.drive(sandwich(space, SearchOptions(), [*seeds, default])), evaluate.asked


def count_to(goal_ns: float, new: Landscape, space: ScheduleSpace, asked: list[Schedule]) -> int:
    """Evaluations up to the first that is as fast; all of them where none is."""
    costs = (new.cost_ns(space.problem, schedule) for schedule in asked)
    return next((number for number, cost_ns in enumerate(costs, 1) if cost_ns <= goal_ns), len(asked))


def far(first: Landscape, other: Landscape) -> float:
    """As `tuner.nearest` has it, of what it would know of such cores."""
    facts = []
    for each in (first, other):
        core = each.machine
        facts.append(CoreFacts(core.l1_bytes, core.l2_bytes, 512, None, core.memory_bytes_per_ns))
    return distance(*facts)


app = commands(__doc__, nearest_machines)

if __name__ == "__main__":
    app()
