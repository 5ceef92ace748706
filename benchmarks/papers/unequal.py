"""Fig. 3 of the Sandwich paper beyond symmetric trees: unequal numbers of cores by node."""

from __future__ import annotations

import statistics

from benchmarks.harness import Broken, Yielded
from phasewise.tuner.plans import PHASES
from tests.support.ablation import WITHIN
from tests.support.machines.unequal import (
    best_ms,
    of_two_kinds,
    searched,
    with_busy_neighbours,
    with_cores_offline,
)

MACHINES = {
    "1 to 3 cores offline": with_cores_offline,
    "1 to 3 cores with a busy neighbour": with_busy_neighbours,
    "P and E cores": of_two_kinds,
}


def unequal_plans(machines: int = 25, first_seed: int = 0) -> Yielded:
    """The search on planted machines of unequal parts: by how much are plans of equal parts worse?

    Each machine has one or two nodes of six cores, of which some are offline or have a busy neighbour (0.1 to
    0.6 of their pace), or cores of two kinds (tests/support/machines/unequal.py). The oracle looks at every
    number of cores of each node, or of each kind. `equal parts`: the best of all symmetric trees; `unequal`:
    after the steps that leave out or add single cores. Exit code 1 where a plan is more than 1 % behind.
    Costs are modelled (Llama 2 7B in bf16), so the figures are the same on every computer.
    """
    for name, planted in MACHINES.items():
        for phase in PHASES:
            equal, unequal, asked = [], [], []
            for seed in range(first_seed, first_seed + machines):
                machine = planted(seed)
                cost = machine.cost(phase)
                of_equal_parts, scored = searched(machine.space, cost)
                oracle_ms = min(map(cost, machine.every()))
                equal.append(100 * (best_ms(of_equal_parts) / oracle_ms - 1))
                unequal.append(100 * (best_ms(scored) / oracle_ms - 1))
                asked.append(len(scored) - len(of_equal_parts))
            yield {
                "machines": name,
                "phase": phase,
                "number": machines,
                "equal parts worse by %, median": statistics.median(equal),
                "at most": max(equal),
                "unequal worse by %, at most": max(unequal),
                "asked for besides, median": statistics.median(asked),
            }
            if max(unequal) > 100 * (WITHIN - 1):
                yield Broken(f"{name}, {phase}: not found")
