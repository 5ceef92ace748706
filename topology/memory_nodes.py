"""The NUMA nodes whose memory a process may use, and which of them are near some CPUs.

On a machine of one node there is nothing to choose, and nothing is read but the kernel's list of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phasewise.topology.cpusets import cpus_of, parse_list
from phasewise.topology.errors import TopologyError
from phasewise.topology.sysfs import NODES, read_machine
from phasewise.topology.tree import Kind, Machine, NumaDistances

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
