"""The parts of a tree: the levels below its root, and the machine they were read from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import prod

from phasewise.topology import Kind

GROUP = "group"
"""The kind of a level that no system tool shows."""

PREFERENCE = (
    *(kind.value for kind in (Kind.NUMA, Kind.PACKAGE, Kind.CORE, Kind.L3, Kind.CLUSTER, Kind.L2)),
    *(kind.value for kind in (Kind.DIE, Kind.L4, Kind.PU)),
    GROUP,
)
"""Preferred level name of a node that belongs to several levels, such as a package that is one NUMA node."""


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth. Each node above has `arity` of them, of which the first `kept` are active."""

    kind: str
    arity: int
    kept: int


@dataclass(frozen=True)
class SymmetricMachine:
    """The symmetric machine that all trees of a search share: its levels, and its PUs in tree order."""

    kinds: tuple[str, ...]
    arities: tuple[int, ...]
    pus: tuple[int, ...]
    numa_nodes: tuple[int | None, ...]
    """The NUMA node of each PU, in tree order."""

    @cached_property
    def digest(self) -> bytes:
        text = repr((self.kinds, self.arities, self.pus, self.numa_nodes))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """PUs in one node of each level: position times weight, summed over levels, is the place of a PU."""
        return tuple(prod(self.arities[level + 1 :]) for level in range(len(self.arities)))


def preferred(kinds: tuple[str, ...]) -> str:
    """The name of a node that is all of `kinds`."""
    return min(kinds, key=PREFERENCE.index)
