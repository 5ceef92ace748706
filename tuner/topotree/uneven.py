"""Cores that a symmetric tree does not describe, and the configurations that are a step away with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from phasewise.topology import Kind, Machine
from phasewise.tuner.plans import rank_on
from phasewise.tuner.topotree.configurations import Configuration

Pus: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class UnevenCores:
    """A machine whose cores a symmetric tree does not describe."""

    machine: Machine
    slow: Pus = ()
    """PUs that were measured slower than others of their kind, the slowest first."""

    @classmethod
    def of(cls, machine: Machine, tree_pus: Sequence[int], slow: Pus = ()) -> UnevenCores | None:
        """The machine's uneven cores; None where the tree holds a PU of every core, and none is slow."""
        held = set(tree_pus)
        whole = all(held & set(core) for core in machine.allowed_cores())
        return None if whole and not slow else cls(machine, slow)

    def neighbours(self, configuration: Configuration) -> Iterator[Configuration]:
        """Configurations that are a step away from this one; one may come more than once."""
        parts = [rank.cores for rank in configuration.ranks]
        used = {pu for cores in parts for pu in cores}
        for place, cores in enumerate(parts):
            for other in (*self._with_fewer(cores), *self._with_more(cores, used, is_alone=len(parts) == 1)):
                if other:
                    yield self._of([*parts[:place], other, *parts[place + 1 :]])
        for node in self._nodes():
            if used.isdisjoint(node) and (free := self._free(sorted(node), used)):
                yield self._of([*parts, tuple(free)])
        for pus in self._kinds():
            if used.isdisjoint(pus):
                yield self._of([pus])

    def _of(self, parts: Sequence[Pus]) -> Configuration:
        return Configuration(tuple(rank_on(self.machine, tuple(sorted(cores))) for cores in parts))

    def _with_fewer(self, cores: Pus) -> Iterator[Pus]:
        own, slow = set(cores), [pu for pu in self.slow if pu in cores]
        for count in range(1, len(slow) + 1):
            yield tuple(own.difference(slow[:count]))
        for pus in self._kinds():
            yield tuple(own.difference(pus))
        for count in (1, len(cores) // 2):
            yield cores[: len(cores) - count]

    def _with_more(self, cores: Pus, used: set[int], *, is_alone: bool) -> Iterator[Pus]:
        """A rank's cores and some of the free cores of its nodes, or of any node if it is the only rank.

        Cores of one kind are added at a time, and slow cores only with all others.
        """
        near = {pu for node in self._nodes() if is_alone or not node.isdisjoint(cores) for pu in node}
        for pus in self._kinds():
            free = self._free([pu for pu in pus if pu in near], used)
            for count in (1, len(free) // 2, len(free)):
                yield (*cores, *free[:count])
            yield (*cores, *free, *(pu for pu in self.slow if pu in near and pu in pus and pu not in used))

    def _free(self, pus: Sequence[int], used: set[int]) -> list[int]:
        """The PUs among `pus` whose cores are unused and not slow."""
        return [
            pu for pu in pus if pu in self._firsts and pu not in self.slow and not self._is_used(pu, used)
        ]

    def _is_used(self, pu: int, used: set[int]) -> bool:
        return not used.isdisjoint(self._core_of[pu])

    @cached_property
    def _core_of(self) -> dict[int, Pus]:
        return {pu: core for core in self.machine.allowed_cores() for pu in core}

    @cached_property
    def _firsts(self) -> Pus:
        """The first allowed PU of each core."""
        return tuple(core[0] for core in self.machine.allowed_cores())

    def _nodes(self) -> list[set[int]]:
        return [set(node.cpus) for node in self.machine.nodes(Kind.NUMA)] or [set(self.machine.allowed_pus)]

    def _kinds(self) -> list[Pus]:
        """The first PU of each core, by kind of core; all together where they are alike."""
        number_of = {pu: number for number, kind in enumerate(self.machine.kinds) for pu in kind.cpus}
        by_kind: dict[int, list[int]] = {}
        for pu in self._firsts:
            by_kind.setdefault(number_of.get(pu, -1), []).append(pu)
        return [tuple(pus) for pus in by_kind.values()]
