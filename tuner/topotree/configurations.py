"""From trees to service configurations: the number of ranks, and the PUs of each (the paper's section 5.3).

A horizontal cross-section of a tree makes a rank of every node that it meets. A tree gives one configuration
per depth, fewer where the operators cannot be divided further. `UnevenCores` adds configurations of cores
that a symmetric tree does not describe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeAlias

from phasewise._words import counted
from phasewise.topology import Kind, Machine
from phasewise.tuner.plans import Phase, RankCores, ServicePlan, Source, rank_on
from phasewise.tuner.topotree.tree import SymmetricMachine, TopoTree

HEAD_LANES = 16
"""Outputs of a panel: a head that is divided from its neighbours must fill whole panels."""

FFN_BLOCK = 32
"""The fewest inner columns of a rank's feed-forward layer: one block of quantised weights."""

Partition = tuple[tuple[tuple[int, ...], ...], ...]
"""A cross-section's division: for each level of the machine, its active siblings by rank coordinate."""


@dataclass(frozen=True, slots=True)
class OperatorLimits:
    """The numbers of ranks into which a model's operators can be divided.

    The paper divides only where the number of ranks divides that of heads. Here ranks may hold unequal
    numbers of KV heads, each with its query heads, so a number of ranks is allowed if it shrinks the largest
    share. More ranks than KV heads share these and divide their query heads, up to one query head per rank:
    each reads one KV head, and its columns of the weights."""

    n_heads: int
    n_kv_heads: int
    """Heads that ranks take whole: KV heads, or query heads over latent vectors."""
    head_dim: int
    ffn: int

    def allows(self, n_ranks: int) -> bool:
        return self.reason(n_ranks) is None

    def reason(self, n_ranks: int) -> str | None:
        """The reason, in one line, why the model cannot run in `n_ranks` ranks; None if it can."""
        if n_ranks == 1:
            return None
        most = max(self.n_heads, self.n_kv_heads)
        if not 1 <= n_ranks <= most:
            return (
                f"{counted(n_ranks, 'rank')} cannot share {counted(most, 'query head')}: each needs at least"
                " one"
            )
        is_shared = n_ranks > self.n_kv_heads
        if not is_shared and self._largest_share(n_ranks) == self._largest_share(n_ranks - 1):
            return (
                f"{counted(n_ranks, 'rank')} are no faster than {n_ranks - 1}: some rank still has "
                f"{self._largest_share(n_ranks)} of the {self.n_kv_heads} KV heads"
            )
        if self.head_dim % HEAD_LANES:
            return f"heads of {self.head_dim} are not divided between ranks, only multiples of {HEAD_LANES}"
        if self.ffn // FFN_BLOCK < n_ranks:
            each = f"each of {counted(n_ranks, 'rank')}"
            return f"a feed-forward layer of {self.ffn} has no block of {FFN_BLOCK} for {each}"
        return None

    def _largest_share(self, n_ranks: int) -> int:
        return -(-self.n_kv_heads // n_ranks)


@dataclass(frozen=True)
class Configuration:
    """The ranks of one phase; equal if the same sets of PUs form the ranks."""

    ranks: tuple[RankCores, ...]

    @cached_property
    def key(self) -> str:
        """A digest of the sets of PUs that form ranks, regardless of machine and order."""
        text = repr(sorted(sorted(rank.cores) for rank in self.ranks))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def group(self) -> tuple[int, tuple[int | None, ...]]:
        """The group in which patience counts: number of ranks, and each rank's NUMA node (None: several)."""
        return len(self.ranks), tuple(rank.numa_node for rank in self.ranks)

    @property
    def n_pus(self) -> int:
        return sum(len(rank.cores) for rank in self.ranks)

    def plan(self, phase: Phase, source: Source = "default") -> ServicePlan:
        return ServicePlan(phase, self.ranks, source)


def cross_section(tree: TopoTree, depth: int) -> Partition:
    """The PUs that go together in the ranks of a cut below `depth`, equal for equal configurations; much
    cheaper to compute than the configuration."""
    partition = []
    for positions, kept in zip(tree.active, tree.kept_by_chain(), strict=True):
        n_blocks = prod(kept[: max(depth, 0)])
        size = len(positions) // n_blocks
        blocks = (tuple(sorted(positions[start : start + size])) for start in range(0, len(positions), size))
        partition.append(tuple(sorted(blocks)))
        depth -= len(kept)
    return tuple(partition)


def configuration_of(base: SymmetricMachine, partition: Partition) -> Configuration:
    """The ranks of a cross-section, one for every choice of a block at each level, in tree order."""
    ranks = []
    for blocks in product(*partition):
        weighted = (
            [position * weight for position in block]
            for block, weight in zip(blocks, base.weights, strict=True)
        )
        places = [sum(parts) for parts in product(*weighted)]
        nodes = {base.numa_nodes[place] for place in places}
        cores = tuple(sorted(base.pus[place] for place in places))
        ranks.append(RankCores(cores, nodes.pop() if len(nodes) == 1 else None))
    return Configuration(tuple(ranks))


Pus: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class UnevenCores:
    """A machine with cores that a symmetric tree does not describe."""

    machine: Machine
    slow: Pus = ()
    """PUs measured slower than others of their kind, slowest first."""

    @classmethod
    def of(cls, machine: Machine, tree_pus: Sequence[int], slow: Pus = ()) -> UnevenCores | None:
        """The machine's uneven cores; None where the tree has a PU of every core, and no core is slow."""
        held = set(tree_pus)
        whole = all(held & set(core) for core in machine.allowed_cores())
        return None if whole and not slow else cls(machine, slow)

    def neighbours(self, configuration: Configuration) -> Iterator[Configuration]:
        """Configurations a step away from this one; one may occur more than once."""
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
        """A rank's cores with some free cores of its nodes, or of any node if it is the only rank. Cores of
        one kind are added at a time, and slow cores only with all others."""
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
        """The first PU of each core, by kind of core; in one list where cores are alike."""
        number_of = {pu: number for number, kind in enumerate(self.machine.kinds) for pu in kind.cpus}
        by_kind: dict[int, list[int]] = {}
        for pu in self._firsts:
            by_kind.setdefault(number_of.get(pu, -1), []).append(pu)
        return [tuple(pus) for pus in by_kind.values()]
