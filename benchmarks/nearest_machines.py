"""Evaluations to 95 % of the final speed: begun with the nearest core's schedule, and cold.

    python benchmarks/nearest_machines.py [--triples 10]

SIMULATED: there are no recordings of whole searches on three kinds of real cores yet. Each triple is three
kinds of cores of a seeded cost model (tests/support/machines/landscapes.py): one, one like it (the same
caches, all rates and edges within a fifth of it), and one that has nothing to do with them. Each in turn is
new: the nearer of the other two, by what `tuner.nearest` compares, gives its winner for the same product.
Final speed is that of the cold search's winner. Every evaluation counts, the default schedule's first.
"""

from __future__ import annotations

import statistics
from itertools import product
from typing import Annotated

from typer import Option

from benchmarks.harness import Yielded, commands
from phasewise.kerneldb.records import Schedule
from phasewise.tuner.nearest import CoreFacts, distance
from phasewise.tuner.search.model import model_schedule
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.search.sandwich import sandwich
from phasewise.tuner.search.space import ScheduleSpace
from tests.support.machines.landscapes import Evaluator, Landscape, space_of

ROWS = (1, 8, 64, 512)
SHARE = 0.95


def nearest_machines(triples: Annotated[int, Option(help="of kinds of cores")] = 10) -> Yielded:
    for m, is_alike in product(ROWS, (True, False)):
        space = space_of(m)
        cold, warm = [], []
        for seed in range(triples):
            kinds = [Landscape(seed), Landscape(seed, unlike=0.2), Landscape(triples + seed)]
            winners = {kind: searched(kind, space, []) for kind in kinds}
            for new in kinds[:2] if is_alike else kinds[2:]:
                donor = min((one for one in kinds if one != new), key=lambda one: far(new, one))
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


def searched(new: Landscape, space: ScheduleSpace, seeds: list[Schedule]) -> tuple[Schedule, list[Schedule]]:
    """The winner, and what was asked for, in this order. The first kernel's model schedule is the default."""
    default = model_schedule(space, space.kernels[0])
    evaluate = Evaluator(new, space.problem)
    return evaluate.drive(sandwich(space, SearchOptions(), [default, *seeds])), evaluate.asked


def count_to(goal_ns: float, new: Landscape, space: ScheduleSpace, asked: list[Schedule]) -> int:
    """Evaluations up to the first that is as fast; all of them where none is."""
    costs = (new.cost_ns(space.problem, one) for one in asked)
    return next((number for number, cost_ns in enumerate(costs, 1) if cost_ns <= goal_ns), len(asked))


def far(one: Landscape, other: Landscape) -> float:
    """As `tuner.nearest` has it, of what it would know of such cores."""
    facts = []
    for each in (one, other):
        core = each.machine
        facts.append(CoreFacts(core.l1_bytes, core.l2_bytes, 512, None, core.memory_bytes_per_ns))
    return distance(*facts)


app = commands(__doc__, nearest_machines)

if __name__ == "__main__":
    app()
