"""Unequal numbers of cores by rank: on planted machines the best is found, and equal ones are searched as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from phasewise.topology import CpuKind, Kind, Machine, read_lstopo
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import CoreShare, default_rates
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.uneven import Scored, refine
from phasewise.tuner.config.walk import CandidateBatch, Rules, walk
from phasewise.tuner.plans import PHASES, Phase, rank_on
from phasewise.tuner.search.protocol import drive
from phasewise.tuner.topotree import Configuration, OperatorLimits, UnevenCores, fundamental
from tests.support.machines.paper_machines import build, epyc, kunpeng, llama_2_7b, xeon
from tests.support.machines.planted import step_cost
from tests.support.tiers import n_examples

LIMITS = OperatorLimits(32, 32, 128, 11008)
SEEDS = 25
HYBRID = Path(__file__).parents[2] / "data/topology/lstopo_hybrid.xml"

Cost = Callable[[Configuration], float]


def space_of(machine: Machine, slow: tuple[int, ...] = ()) -> ConfigSpace:
    tree = fundamental(machine).tree
    return ConfigSpace(tree, LIMITS, uneven=UnevenCores.of(machine, tree.pus, slow))


def searched(space: ConfigSpace, cost: Cost) -> dict[str, Scored]:
    """All that a search asks for, with its costs."""
    scored: dict[str, Scored] = {}

    def answer(ask: CandidateBatch) -> list[float]:
        for candidate in ask.candidates:
            scored[candidate.configuration.key] = candidate.configuration, cost(candidate.configuration)
        return [scored[candidate.configuration.key][1] for candidate in ask.candidates]

    drive(walk(space, Rules()), answer)
    drive(refine(space, dict(scored)), answer)
    return scored


def planted_cost(machine: Machine, phase: Phase, shares: dict[int, CoreShare]) -> Cost:
    return step_cost(ModelledEvaluator(machine, llama_2_7b(), default_rates(machine, shares)), phase)


def by_numbers(machine: Machine, slow: tuple[int, ...]) -> Iterator[Configuration]:
    """A rank on each node or one on all, with every number of each node's cores, the slowest going first."""
    parts = []
    for node in machine.nodes(Kind.NUMA):
        own = [pu for pu in node.cpus if pu in set(machine.allowed_pus)]
        ranked = sorted(own, key=lambda pu: slow.index(pu) if pu in slow else len(slow) + own.index(pu))
        parts.append([tuple(sorted(ranked[n_gone:])) for n_gone in range(len(ranked) + 1)])
    for cores in product(*parts):
        held = [part for part in cores if part]
        if held:
            yield Configuration(tuple(rank_on(machine, part) for part in held))
            yield Configuration((rank_on(machine, tuple(pu for part in held for pu in part)),))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(n_examples(SEEDS)))
def test_slow_cores_and_cores_that_are_offline_leave_unequal_numbers(seed: int, phase: Phase) -> None:
    """As good as the best of all numbers of cores by node, within a hundredth."""
    random = Random(seed)
    whole = build("planted", ((Kind.NUMA, random.randint(1, 2)), (Kind.L3, 1), (Kind.CORE, 6)))
    offline = set(random.sample(whole.allowed_pus, random.randint(0, 3)))
    machine = replace(whole, allowed_pus=tuple(pu for pu in whole.allowed_pus if pu not in offline))
    slow = tuple(random.sample(machine.allowed_pus, random.randint(0, 3)))
    pace = {pu: random.uniform(0.1, 0.6) for pu in slow}
    slow = tuple(sorted(slow, key=lambda pu: pace[pu]))
    cost = planted_cost(machine, phase, {pu: CoreShare(share, share) for pu, share in pace.items()})

    found_ms = min(each for _, each in searched(space_of(machine, slow), cost).values())
    best_ms = min(map(cost, by_numbers(machine, slow)))

    assert found_ms <= 1.01 * best_ms


@pytest.mark.parametrize("seed", range(n_examples(SEEDS)))
def test_of_two_kinds_of_cores_both_are_used_where_that_is_faster(seed: int) -> None:
    random = Random(seed)
    n_cores, n_slow = random.randint(4, 12), random.randint(1, 8)
    whole = build("hybrid", ((Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, n_cores + n_slow)))
    pus = whole.allowed_pus
    machine = replace(
        whole, kinds=(CpuKind("efficiency", pus[n_cores:]), CpuKind("performance", pus[:n_cores]))
    )
    share = CoreShare(random.uniform(0.05, 0.9), random.uniform(0.05, 0.9))
    for phase in PHASES:
        cost = planted_cost(machine, phase, dict.fromkeys(pus[n_cores:], share))
        scored = searched(space_of(machine), cost)
        numbers = product(range(n_cores + 1), range(n_slow + 1))
        every = [(*pus[:fast], *pus[n_cores : n_cores + slow]) for fast, slow in numbers if fast + slow]
        best_ms = min(cost(Configuration((rank_on(machine, cores),))) for cores in every)

        assert min(each for _, each in scored.values()) <= 1.01 * best_ms


def test_a_described_hybrid_machine_is_searched_with_both_kinds() -> None:
    machine = read_lstopo(HYBRID)
    space = space_of(machine)
    fast = set(machine.kinds[-1].cpus)
    scored = searched(space, planted_cost(machine, "prefill", {}))
    best = min(scored.values(), key=lambda each: each[1])[0]

    assert fast == set(space.tree.pus)
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
