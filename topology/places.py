"""The PUs that a process may use, in an order that equal machines share: how a plan names them elsewhere.

A place is a position in that order. It follows the tree, so that neighbours share the most; parts inside one
part come by their shape, and by number only where they are alike. So the same plan falls on like cores of a
machine whose numbers differ, and on the machine that it was made on it falls on the very same.

`MemoryNodes` are the NUMA nodes whose memory a process may use. On a machine of one node there is nothing to
choose, and nothing is read but the kernel's list of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phasewise.topology.cpusets import cpus_of, parse_list
from phasewise.topology.sysfs import NODES, read_machine
from phasewise.topology.tree import Kind, Machine, Node, NumaDistances, TopologyError


def places(machine: Machine) -> tuple[int, ...]:
    """The PUs of a machine in the order of their places."""
    kinds = {cpu: rank for rank, kind in enumerate(machine.kinds) for cpu in kind.cpus}
    _, order = _ordered(machine.tree, frozenset(machine.allowed_pus), kinds)
    return (*order, *sorted(set(machine.allowed_pus).difference(order)))


def places_of(machine: Machine, pus: Sequence[int]) -> tuple[int, ...]:
    """The places of PUs, in their order. TopologyError where this process may not use one."""
    place = {pu: index for index, pu in enumerate(places(machine))}
    if foreign := [pu for pu in pus if pu not in place]:
        raise TopologyError(f"this process may not use core {foreign[0]}: it has no place in a plan")
    return tuple(place[pu] for pu in pus)


def pus_at(machine: Machine, wanted: Sequence[int]) -> tuple[int, ...]:
    """The PUs at these places. TopologyError where this process has fewer."""
    order = places(machine)
    if beyond := [place for place in wanted if not 0 <= place < len(order)]:
        raise TopologyError(f"there is no place {beyond[0]}: this process may use {len(order)} PUs")
    return tuple(order[place] for place in wanted)


def _ordered(node: Node, allowed: frozenset[int], kinds: dict[int, int]) -> tuple[str, tuple[int, ...]]:
    """The shape of what may be used inside a node, and its PUs in order."""
    inner = [_ordered(child, allowed, kinds) for child in node.children if allowed.intersection(child.cpus)]
    if not inner:
        own = tuple(pu for pu in node.cpus if pu in allowed)
        return f"{node.kind}:{len(own)}:{kinds.get(own[0], '') if own else ''}", own
    inner.sort(key=lambda part: (part[0], min(part[1], default=-1)))
    shape = "+".join(shape for shape, _ in inner)
    return f"{node.kind}({shape})", tuple(pu for _, pus in inner for pu in pus)


FAR = 255
"""The rating of a node that the firmware does not rate: the highest that there is."""


@dataclass(frozen=True)
class MemoryNodes:
    """NUMA nodes. cpus: of every node that has any. usable: two or more nodes with memory for this process,
    ascending."""

    cpus: Mapping[int, frozenset[int]]
    usable: tuple[int, ...]
    distances: NumaDistances | None = None

    def homes(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """The nodes that have these CPUs, ascending, whether they have memory or not."""
        wanted = set(cpus)
        return tuple(sorted(node for node, own in self.cpus.items() if own & wanted))

    def nearest(self, node: int) -> int:
        """The nearest node with memory for this process: `node` itself where it has some."""
        return min(self.usable, key=lambda other: (other != node, self._distance(node, other), other))

    def _distance(self, first: int, second: int) -> int:
        rated = None if self.distances is None else self.distances.between(first, second)
        return FAR if rated is None else rated


def memory_nodes(machine: Machine, allowed: frozenset[int] | None = None) -> MemoryNodes | None:
    """The memory nodes of a machine, cut to those that a process may use; None where that leaves no
    choice."""
    nodes = machine.nodes(Kind.NUMA)
    usable = {
        node.os_index
        for node in nodes
        if node.os_index is not None and node.size_bytes and (allowed is None or node.os_index in allowed)
    }
    if len(usable) < 2:
        return None
    cpus = {node.os_index: frozenset(node.cpus) for node in nodes if node.os_index is not None and node.cpus}
    return MemoryNodes(cpus, tuple(sorted(usable)), machine.distances)


def read_memory_nodes(root: Path = Path("/")) -> MemoryNodes | None:
    """The memory nodes of the machine under `root` that this process may use; None where none is left or
    told."""
    try:
        allowed = _allowed(root) & _nodes(root / NODES / "has_memory")
        return memory_nodes(read_machine(root), allowed) if len(allowed) > 1 else None
    except (OSError, ValueError, TopologyError):
        return None


def _nodes(path: Path) -> frozenset[int]:
    return frozenset(cpus_of(parse_list(path.read_text())))


def _allowed(root: Path) -> frozenset[int]:
    """The NUMA nodes that the process's cpuset has."""
    for line in (root / "proc/self/status").read_text().splitlines():
        name, _, listed = line.partition(":")
        if name == "Mems_allowed_list":
            return frozenset(cpus_of(parse_list(listed)))
    return frozenset()
