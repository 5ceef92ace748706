"""Reference plans: the usual ways to run a server, against which a tuned plan is compared.

There are three: every CPU that the system shows; every physical core once; a process on each NUMA node. On a
small machine several of them are the same plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phasewise.topology import Kind, Machine
from phasewise.tuner.plans import Phase, ServicePlan, rank_on

ALL_CORES = "all cores"
PHYSICAL_CORES = "all physical cores"
PER_NODE = "one process per NUMA node"
FEWER = "plan for fewer sequences"
"""The name of the plan for fewer sequences, which a band for more sequences has to beat."""


@dataclass(frozen=True)
class Reference:
    """One usual way of running a server, and its plan on a machine."""

    name: str
    plan: ServicePlan | None
    reason: str | None = None
    """The reason why there is no plan on this machine."""

    def has(self, plan: ServicePlan) -> bool:
        """True if the reference's plan uses the same sets of PUs."""
        return self.plan is not None and same_cores(self.plan, plan)


def references(machine: Machine, phase: Phase, refusal: Callable[[int], str | None]) -> tuple[Reference, ...]:
    """The three reference plans on a machine. `refusal(ranks)`: the reason why the model cannot be split into
    `ranks` ranks, or None."""
    physical = _one_pu_a_core(machine, machine.allowed_pus)
    nodes = _nodes(machine)
    reason = refusal(len(nodes)) if len(nodes) > 1 else None
    per_node = None if reason else ServicePlan(phase, tuple(rank_on(machine, pus) for pus in nodes))
    return (
        Reference(ALL_CORES, ServicePlan(phase, (rank_on(machine, machine.allowed_pus),))),
        Reference(PHYSICAL_CORES, ServicePlan(phase, (rank_on(machine, physical),))),
        Reference(PER_NODE, per_node, reason),
    )


def same_cores(plan: ServicePlan, other: ServicePlan) -> bool:
    """True if two plans of one phase use the same sets of PUs."""
    return _as_sets(plan) == _as_sets(other)


def _as_sets(plan: ServicePlan) -> list[frozenset[int]]:
    return sorted((frozenset(rank.cores) for rank in plan.ranks), key=sorted)


def _one_pu_a_core(machine: Machine, pus: tuple[int, ...]) -> tuple[int, ...]:
    chosen = set(pus)
    cores = (tuple(pu for pu in core if pu in chosen) for core in machine.allowed_cores())
    return tuple(core[0] for core in cores if core) or pus


def _nodes(machine: Machine) -> list[tuple[int, ...]]:
    """The first PU of each core, by NUMA node; in one list where the machine names no nodes."""
    allowed = set(machine.allowed_pus)
    own = [tuple(pu for pu in node.cpus if pu in allowed) for node in machine.nodes(Kind.NUMA)]
    nodes = [_one_pu_a_core(machine, pus) for pus in own if pus]
    return nodes or [_one_pu_a_core(machine, machine.allowed_pus)]
