"""The machine as a tree of what its CPUs share: `Machine > Package > NUMA > L3 > (L2) > Core > PU`.

The levels are nested by their CPU sets, not by a fixed order, so an L3 that spans two NUMA nodes encloses
them, and a level that the machine does not have is simply absent. A PU is what the kernel calls a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


class TopologyError(Exception):
    """A machine cannot be read. The message names the source, what is wrong and what to do."""

    exit_code: ClassVar[int] = 1


LIVE = "this machine"
"""The source of a description that was read from the running system."""


class Kind(StrEnum):
    """Kinds of nodes. The order is the order of nesting where two nodes hold the same CPUs."""

    MACHINE = "machine"
    PACKAGE = "package"
    NUMA = "numa"
    DIE = "die"
    L4 = "l4"
    L3 = "l3"
    CLUSTER = "cluster"
    L2 = "l2"
    CORE = "core"
    PU = "pu"


@dataclass(frozen=True)
class Node:
    """One part of the machine and the parts inside it. `cpus` ascends and is empty for memory without CPUs of
    its own. `size_bytes` is a cache's capacity or a NUMA node's memory, None where unknown. A core carries
    its L1 sizes, a NUMA node the size of the cache in front of its memory."""

    kind: Kind
    os_index: int | None
    cpus: tuple[int, ...]
    size_bytes: int | None = None
    l1d_bytes: int | None = None
    l1i_bytes: int | None = None
    memory_cache_bytes: int | None = None
    children: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        """This node and everything inside it, outer before inner, in CPU order."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Cpu:
    """The kind of CPU, in the kernel's words; None where the source does not say."""

    architecture: str | None = None
    vendor: str | None = None
    family: str | None = None
    model: str | None = None
    name: str | None = None
    features: frozenset[str] = frozenset()
    core_override: str | None = None
    """The name in PHASEWISE_CORE on the running machine: the kernels treat its cores as those of this
    name."""


@dataclass(frozen=True)
class CpuKind:
    """A kind of core of a hybrid machine. Kinds are listed from the slowest to the fastest."""

    name: str
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class NumaDistances:
    """Distances between NUMA nodes by the firmware's rating: 10 is local, 20 twice as slow. `rows[i][j]` is
    from `nodes[i]` to `nodes[j]`. Ratings rank nodes; they are no measurements."""

    nodes: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    def between(self, first: int, second: int) -> int | None:
        """The rating from one node to another; None where either is not rated."""
        if first not in self.nodes or second not in self.nodes:
            return None
        return self.rows[self.nodes.index(first)][self.nodes.index(second)]


@dataclass(frozen=True)
class MemoryAccess:
    """The firmware's figures of a NUMA node's memory, as `initiators` reach it; None where it does not say.
    `initiators` are PUs, ascending. A node may have several entries, one for each set of PUs."""

    node: int
    initiators: tuple[int, ...]
    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None
    read_ns: int | None = None
    write_ns: int | None = None


@dataclass(frozen=True)
class Counts:
    """The number of parts of each kind. `numa_nodes` includes memory without CPUs; `pus` are the online
    ones."""

    packages: int
    numa_nodes: int
    l3: int
    cores: int
    pus: int
    allowed_pus: int


@dataclass(frozen=True)
class Machine:
    """A machine and the part of it that this process may use. `cpu_quota` is in CPUs (1.5 = one and a half),
    None without a limit. `kinds` is empty unless cores differ. `distances` and `memory` are what the firmware
    claims, where it does."""

    source: str
    tree: Node
    cpu: Cpu
    allowed_pus: tuple[int, ...]
    cpu_quota: float | None = None
    kinds: tuple[CpuKind, ...] = field(default=())
    distances: NumaDistances | None = None
    memory: tuple[MemoryAccess, ...] = ()

    @property
    def is_live(self) -> bool:
        """True of the machine that this process runs on, as it was read."""
        return self.source == LIVE

    def nodes(self, kind: Kind) -> tuple[Node, ...]:
        """All nodes of a kind, in CPU order."""
        return tuple(node for node in self.tree.walk() if node.kind is kind)

    def counts(self) -> Counts:
        return Counts(
            packages=len(self.nodes(Kind.PACKAGE)),
            numa_nodes=len(self.nodes(Kind.NUMA)),
            l3=len(self.nodes(Kind.L3)),
            cores=len(self.nodes(Kind.CORE)),
            pus=len(self.nodes(Kind.PU)),
            allowed_pus=len(self.allowed_pus),
        )

    def cores_paid(self, n_own: int, n_others: int) -> int:
        """Cores that one of a server's instances may use, with a thread on each, by its share of the quota;
        at least one. n_others: cores of the server's other instances."""
        if self.cpu_quota is None:
            return n_own
        return max(1, min(n_own, int(self.cpu_quota * n_own / (n_own + n_others))))

    def allowed_cores(self) -> tuple[tuple[int, ...], ...]:
        """The allowed PUs of each core that has any, in tree order, so that neighbours share the most."""
        allowed = set(self.allowed_pus)
        cores = (tuple(cpu for cpu in core.cpus if cpu in allowed) for core in self.nodes(Kind.CORE))
        return tuple(core for core in cores if core)
