"""Unequal numbers of cores by rank: on planted machines the best is found, and equal ones are searched as
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.topology import Kind, Machine, read_lstopo
from phasewise.tuner.config.walk import refine
from phasewise.tuner.plans import PHASES, Phase, rank_on
from phasewise.tuner.topotree import Configuration, UnevenCores, fundamental
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.machines.unequal import (
    Unequal,
    best_ms,
    of_two_kinds,
    searched,
    space_of,
    with_both,
    with_busy_neighbours,
    with_cores_offline,
)
from tests.support.tiers import n_examples

SEEDS = 25
HYBRID = Path(__file__).parents[2] / "data/topology/lstopo_hybrid.xml"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(n_examples(SEEDS)))
@pytest.mark.parametrize("planted", [with_both, with_cores_offline, with_busy_neighbours, of_two_kinds])
def test_the_best_of_unequal_numbers_of_cores_is_found(
    planted: Callable[[int], Unequal], seed: int, phase: Phase
) -> None:
    """As good as the best of all numbers of cores by node, or by kind, within a hundredth."""
    unequal = planted(seed)
    cost = unequal.cost(phase)

    _, scored = searched(unequal.space, cost)

    assert best_ms(scored) <= 1.01 * min(map(cost, unequal.every()))


def test_a_described_hybrid_machine_is_searched_with_both_kinds() -> None:
    machine = read_lstopo(HYBRID)
    unequal = Unequal(machine)
    fast = set(machine.kinds[-1].cpus)
    _, scored = searched(unequal.space, unequal.cost("prefill"))
    best = min(scored.values(), key=lambda each: each[1])[0]

    assert fast == set(unequal.space.tree.pus)
    cores = {pu for rank in best.ranks for pu in rank.cores}
    assert fast & cores
    assert cores - fast


@pytest.mark.parametrize(
    "machine", [epyc(1), epyc(2), kunpeng(), xeon(), xeon(2)], ids=lambda each: each.source
)
def test_nothing_more_is_asked_of_an_equal_machine(machine: Machine) -> None:
    tree = fundamental(machine).tree
    configuration = Configuration((rank_on(machine, tree.pus),))

    assert UnevenCores.of(machine, tree.pus) is None
    with pytest.raises(StopIteration):
        next(refine(space_of(machine), {configuration.key: (configuration, 1.0)}))


def test_every_neighbour_fits_the_machine_and_the_ranks_are_apart() -> None:
    whole = xeon(2)
    machine = replace(whole, allowed_pus=tuple(pu for pu in whole.allowed_pus if pu % 7))
    uneven = UnevenCores(machine, machine.allowed_pus[3:6])
    allowed = set(machine.allowed_pus)
    parts = [tuple(pu for pu in node.cpus if pu in allowed)[2:9] for node in machine.nodes(Kind.NUMA)]
    start = Configuration(tuple(rank_on(machine, part) for part in parts))
    near = [*uneven.neighbours(start)]

    assert near
    for configuration in near:
        cores = [pu for rank in configuration.ranks for pu in rank.cores]
        assert len(cores) == len(set(cores))
        assert all(rank == rank_on(machine, rank.cores) for rank in configuration.ranks)
