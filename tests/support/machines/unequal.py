"""Machines of unequal parts whose best plan is known: cores offline, busy neighbours, two kinds of cores.

The best of each is found by looking at every number of cores, of each node or of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

from phasewise.topology import CpuKind, Kind, Machine
from phasewise.topology.tree import Node
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import CoreShare, default_rates
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.walk import CandidateBatch, Rules, Scored, refine, walk
from phasewise.tuner.plans import Phase, rank_on
from phasewise.tuner.search.protocol import drive
from phasewise.tuner.topotree import Configuration, OperatorLimits, UnevenCores, fundamental
from tests.support.machines.paper_machines import build, llama_2_7b
from tests.support.machines.planted import step_cost

LIMITS = OperatorLimits(32, 32, 128, 11008)
CORES = 6
"""Of a node."""

Cost = Callable[[Configuration], float]
"""Milliseconds of a step."""


@dataclass(frozen=True)
class Unequal:
    """A machine, the pace of its slower cores, and every configuration that its best one is looked for in."""

    machine: Machine
    shares: Mapping[int, CoreShare] = field(default_factory=dict)
    slow: tuple[int, ...] = ()
    """Cores that were measured slower than others of their kind, the slowest first."""

    @property
    def space(self) -> ConfigSpace:
        return space_of(self.machine, self.slow)

    def cost(self, phase: Phase) -> Cost:
        rates = default_rates(self.machine, self.shares)
        return step_cost(ModelledEvaluator(self.machine, llama_2_7b(), rates), phase)

    def every(self) -> Iterator[Configuration]:
        """A rank on each node or one on all, with every number of each node's cores, the slowest going
        first; of two kinds one rank with every number of each.
        """
        is_of_kinds = len(self.machine.kinds) > 1
        own = self.machine.kinds if is_of_kinds else self.machine.nodes(Kind.NUMA)
        parts = [[ranked[:count] for count in range(len(ranked) + 1)] for ranked in map(self._ranked, own)]
        for cores in product(*parts):
            held = [tuple(sorted(part)) for part in cores if part]
            if held:
                together = tuple(sorted(pu for part in held for pu in part))
                yield Configuration((rank_on(self.machine, together),))
            if held and not is_of_kinds:
                yield Configuration(tuple(rank_on(self.machine, part) for part in held))

    def _ranked(self, part: CpuKind | Node) -> list[int]:
        """The allowed cores of a part of the machine, those that go first last."""
        own = [pu for pu in part.cpus if pu in set(self.machine.allowed_pus)]
        return sorted(own, key=lambda pu: -self.slow.index(pu) if pu in self.slow else -len(self.slow))


def space_of(machine: Machine, slow: tuple[int, ...] = ()) -> ConfigSpace:
    tree = fundamental(machine).tree
    return ConfigSpace(tree, LIMITS, uneven=UnevenCores.of(machine, tree.pus, slow))


def searched(space: ConfigSpace, cost: Cost) -> tuple[dict[str, Scored], dict[str, Scored]]:
    """All that the walk over equal parts asked for, and all that a search did, with its costs."""
    scored: dict[str, Scored] = {}

    def answer(ask: CandidateBatch) -> list[float]:
        for candidate in ask.candidates:
            scored[candidate.configuration.key] = candidate.configuration, cost(candidate.configuration)
        return [scored[candidate.configuration.key][1] for candidate in ask.candidates]

    drive(walk(space, Rules()), answer)
    of_equal_parts = dict(scored)
    drive(refine(space, of_equal_parts), answer)
    return of_equal_parts, scored


def best_ms(scored: Mapping[str, Scored]) -> float:
    return min(cost_ms for _, cost_ms in scored.values())


def with_cores_offline(seed: int) -> Unequal:
    """One or two nodes of six cores, of which one to three are offline."""
    return _planted(Random(seed), least_offline=1, most_slow=0)


def with_busy_neighbours(seed: int) -> Unequal:
    """One or two nodes of six cores, one to three of which another program takes most of."""
    return _planted(Random(seed), most_offline=0, least_slow=1)


def with_both(seed: int) -> Unequal:
    """Up to three cores offline and up to three of the others slow."""
    return _planted(Random(seed))


def _planted(
    random: Random, least_offline: int = 0, most_offline: int = 3, least_slow: int = 0, most_slow: int = 3
) -> Unequal:
    whole = build("planted", ((Kind.NUMA, random.randint(1, 2)), (Kind.L3, 1), (Kind.CORE, CORES)))
    offline = set(random.sample(whole.allowed_pus, random.randint(least_offline, most_offline)))
    machine = replace(whole, allowed_pus=tuple(pu for pu in whole.allowed_pus if pu not in offline))
    slow = random.sample(machine.allowed_pus, random.randint(least_slow, most_slow))
    pace = {pu: random.uniform(0.1, 0.6) for pu in slow}
    shares = {pu: CoreShare(share, share) for pu, share in pace.items()}
    return Unequal(machine, shares, tuple(sorted(slow, key=pace.__getitem__)))


def of_two_kinds(seed: int) -> Unequal:
    """Four to twelve performance cores and one to eight slower ones of another kind."""
    random = Random(seed)
    n_cores, n_slow = random.randint(4, 12), random.randint(1, 8)
    whole = build("hybrid", ((Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, n_cores + n_slow)))
    pus = whole.allowed_pus
    kinds = (CpuKind("efficiency", pus[n_cores:]), CpuKind("performance", pus[:n_cores]))
    share = CoreShare(random.uniform(0.05, 0.9), random.uniform(0.05, 0.9))
    return Unequal(replace(whole, kinds=kinds), dict.fromkeys(pus[n_cores:], share))
