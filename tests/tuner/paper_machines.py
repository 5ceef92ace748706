"""The machines of the Sandwich paper (sections 3.3 and 8.1), built from facts that lscpu and data sheets
state, and what a modelled evaluator needs to know of them.

Rates are assumptions of the right size, chosen before any ordering was looked at; where a test needs a
hidden resource, it says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from phasewise.topology import Cpu, Kind, Machine, Node

Level = tuple[Kind, int]
"""A kind, and how many of it each node of the level outside it has."""


def build(
    source: str, levels: Sequence[Level], threads_a_core: int = 1, architecture: str = "x86_64"
) -> Machine:
    """A symmetric machine. Second PUs of cores are numbered after all first ones, as Linux does."""
    cores = 1
    for _, arity in levels:
        cores *= arity
    indices = {kind: count() for kind, _ in levels}
    tree = _node(Kind.MACHINE, None, levels, indices, (cores, threads_a_core))
    cpu = Cpu(architecture=architecture, name=source)
    return Machine(source, tree, cpu, tuple(range(cores * threads_a_core)))


def _node(
    kind: Kind,
    index: int | None,
    inside: Sequence[Level],
    indices: dict[Kind, count[int]],
    cores_and_threads: tuple[int, int],
) -> Node:
    if kind is Kind.CORE and index is not None:
        cores, threads = cores_and_threads
        pus = tuple(index + cores * turn for turn in range(threads))
        return Node(kind, index, pus, children=tuple(Node(Kind.PU, pu, (pu,)) for pu in pus))
    (child, arity), *rest = inside
    children = tuple(
        _node(child, next(indices[child]), rest, indices, cores_and_threads) for _ in range(arity)
    )
    cpus = tuple(sorted(pu for one in children for pu in one.cpus))
    return Node(kind, index, cpus, children=children)


def kunpeng() -> Machine:
    """4x Kunpeng 920 5250: 8 NUMA nodes of 24 cores and one L3 each; no level shows the clusters of 4."""
    levels = ((Kind.PACKAGE, 4), (Kind.NUMA, 2), (Kind.L3, 1), (Kind.CORE, 24))
    return build("4x Kunpeng 920", levels, architecture="aarch64")


def epyc(threads_a_core: int = 2) -> Machine:
    """2x EPYC 7H12, one NUMA node a package (NPS1): 16 L3s of 4 cores in each."""
    levels = ((Kind.PACKAGE, 2), (Kind.NUMA, 1), (Kind.L3, 16), (Kind.CORE, 4))
    return build("2x EPYC 7H12", levels, threads_a_core)


def xeon(threads_a_core: int = 1) -> Machine:
    """2x Xeon Gold 6230: one NUMA node and one L3 of 20 cores in each package."""
    levels = ((Kind.PACKAGE, 2), (Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, 20))
    return build("2x Xeon Gold 6230", levels, threads_a_core)


def tag_clusters(machine: Machine, cores: int = 4) -> tuple[tuple[int, ...], ...]:
    """The PUs of every `cores` neighbouring cores: what shares an LLC tag array on a Kunpeng 920."""
    of_cores = machine.allowed_cores()
    groups = (of_cores[at : at + cores] for at in range(0, len(of_cores), cores))
    return tuple(tuple(pu for core in group for pu in core) for group in groups)
