"""Machines whose best plan is known because it was planted: the paper's with hidden structure, random ones.

The best plan of each is found by brute force over all configurations; a search never sees the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import Random

from phasewise.topology import Kind, Machine
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import MachineRates, default_rates
from phasewise.tuner.config.sharing import HiddenResource
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.steps import ModelShape, Step
from phasewise.tuner.config.walk import machine_beside
from phasewise.tuner.plans import Phase, nodes_of
from phasewise.tuner.topotree import (
    GROUP,
    Configuration,
    OperatorLimits,
    TopoTree,
    fundamental,
    grouped_trees,
)
from tests.support.machines import paper_machines

PROMPT_TOKENS = 512
CONTEXT_TOKENS = 512


@dataclass(frozen=True)
class Planted:
    """A machine, what it hides, and the space of a model on it."""

    name: str
    machine: Machine
    rates: MachineRates
    hidden: tuple[HiddenResource, ...]
    note: str
    shape: ModelShape

    @property
    def space(self) -> ConfigSpace:
        return ConfigSpace(fundamental(self.machine).tree, self._limits)

    def space_beside(self, best: Configuration) -> ConfigSpace:
        """For bands of a plan with these ranks."""
        machine = machine_beside(self.machine, best.plan("decode"))
        return ConfigSpace(fundamental(machine).tree, self._limits, nodes=nodes_of(best.ranks))

    @property
    def _limits(self) -> OperatorLimits:
        shape = self.shape
        return OperatorLimits(shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn)

    def evaluator(self) -> ModelledEvaluator:
        return ModelledEvaluator(self.machine, self.shape, self.rates, self.hidden)


def step_cost(
    evaluator: ModelledEvaluator, phase: Phase, sequences: int = 1
) -> Callable[[Configuration], float]:
    """Milliseconds of one step of a phase, each configuration computed once. sequences: of a decode step."""
    decode = Step("decode", 1, sequences, CONTEXT_TOKENS)
    step = Step("prefill", PROMPT_TOKENS) if phase == "prefill" else decode
    cached: dict[str, float] = {}

    def cost(configuration: Configuration) -> float:
        if configuration.key not in cached:
            with evaluator.open(configuration, phase) as timer:
                cached[configuration.key] = timer(step) / 1e6
        return cached[configuration.key]

    return cost


def kunpeng() -> Planted:
    """4x Kunpeng 920 whose clusters of 4 cores share an LLC tag array that no level shows."""
    machine = paper_machines.kunpeng()
    hidden = paper_machines.kunpeng_tags(machine)
    return _planted("kunpeng", machine, paper_machines.kunpeng_rates(), hidden, "tag clusters of 4 cores")


def epyc() -> Planted:
    """2x EPYC 7H12, SMT on, 4 cores to an L3."""
    machine = paper_machines.epyc()
    return _planted("epyc", machine, paper_machines.epyc_rates(), (), "L3s of 4 cores")


def saturated() -> Planted:
    """2 x 32 cores whose L3s serve what twelve cores read, and less to more: few sequences want few cores."""
    levels = ((Kind.PACKAGE, 2), (Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, 32))
    machine = paper_machines.build("2 x 32 cores", levels)
    rates = default_rates(machine)
    gbps = 12 * rates.core_read_bytes_per_s / 1e9
    rates = replace(rates, numa_read_bytes_per_s=2e9 * gbps)
    hidden = tuple(HiddenResource(l3.cpus, gbps, 0.02) for l3 in machine.nodes(Kind.L3))
    return _planted("saturated", machine, rates, hidden, "12 of 32 cores saturate an L3")


def random_structure(seed: int) -> Planted:
    """One or two hidden structures on one of the paper's machines.

    Each is a legal grouping, of any level and stride, whose nodes saturate well before their PUs are all
    active and lose up to three fifths of their rate beyond that. Together they serve about what the NUMA
    nodes do, or they would not matter.
    """
    rng = Random(seed)
    machine, rates = rng.choice(_MACHINES)()
    tree = fundamental(machine).tree
    structures = [_structure(rng, machine, rates, tree) for _ in range(rng.choice((1, 1, 2)))]
    hidden = tuple(resource for resources, _ in structures for resource in resources)
    note = "; ".join(note for _, note in structures)
    return _planted(f"random {seed} on {machine.source}", machine, rates, hidden, note)


def _planted(
    name: str, machine: Machine, rates: MachineRates, hidden: Sequence[HiddenResource], note: str
) -> Planted:
    return Planted(name, machine, rates, tuple(hidden), note, paper_machines.llama_2_7b())


def _xeon(threads_a_core: int) -> tuple[Machine, MachineRates]:
    machine = paper_machines.xeon(threads_a_core)
    return machine, default_rates(machine)


_MACHINES: tuple[Callable[[], tuple[Machine, MachineRates]], ...] = (
    lambda: (paper_machines.kunpeng(), paper_machines.kunpeng_rates()),
    lambda: (paper_machines.epyc(2), paper_machines.epyc_rates()),
    lambda: (paper_machines.epyc(1), paper_machines.epyc_rates()),
    lambda: _xeon(1),
    lambda: _xeon(2),
)


def _structure(
    rng: Random, machine: Machine, rates: MachineRates, tree: TopoTree
) -> tuple[tuple[HiddenResource, ...], str]:
    grouped = [root for root in grouped_trees(tree) if GROUP in root.kinds]
    root = rng.choice(grouped)
    depth = rng.choice([depth for depth, kind in enumerate(root.kinds, start=1) if kind == GROUP])
    n_nodes = prod(root.arities[:depth])
    size = root.n_pus // n_nodes
    numa_nodes = len(machine.nodes(Kind.NUMA))
    node_gbps = rates.numa_read_bytes_per_s / 1e9
    core_gbps = rates.core_read_bytes_per_s / 1e9
    gbps = max(core_gbps, rng.uniform(0.4, 1.1) * node_gbps * numa_nodes / n_nodes)
    saturating = gbps / core_gbps
    lost = rng.uniform(0.1, 0.6) / max(1.0, size - saturating)
    pus = root.pus
    resources = tuple(
        HiddenResource(tuple(pus[start : start + size]), gbps, lost) for start in range(0, len(pus), size)
    )
    return resources, f"{root.notation} at depth {depth}: {saturating:.1f} of {size} PUs saturate"
