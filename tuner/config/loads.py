"""Decode plans for more sequences beside one for fewer: the same ranks on the same NUMA nodes, other cores.

The engine changes teams between two steps for next to nothing; ranks, and the nodes of their memory, it
cannot change without starting them anew.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.topology import Kind, Machine
from phasewise.tuner.config.frontier import Rules
from phasewise.tuner.plans import ServicePlan

BAND_RULES = Rules(patience=None, share=0.3)
"""Rules of a search for a band, which never gives up a group: its few configurations are all of one group."""


def machine_beside(machine: Machine, plan: ServicePlan) -> Machine:
    """The machine with no PUs to use but those of the nodes on which the plan's ranks are."""
    used = set(plan.cores)
    holders = [set(node.cpus) for node in machine.nodes(Kind.NUMA) if used & set(node.cpus)]
    near = set().union(*holders) if used <= set().union(*holders) else set(machine.allowed_pus)
    return replace(machine, allowed_pus=tuple(pu for pu in machine.allowed_pus if pu in near))
