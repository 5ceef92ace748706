"""All service configurations of one machine and one model, counted and listed without timings.

The space is every grouping of the fundamental tree, every removal of each, and every cross-section of these
trees that the model's operators allow. Different trees often mean the same configuration; a cross-section's
partition (the siblings of each level that go together) is equal exactly when configurations are, and cheap to
compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from random import Random
from typing import TypeAlias

from phasewise.tuner.plans import RankCores, nodes_of
from phasewise.tuner.topotree import (
    GROUP,
    Configuration,
    OperatorLimits,
    TopoTree,
    UnevenCores,
    configuration_of,
    cross_section,
    every_tree,
    grouped_trees,
)
from phasewise.tuner.topotree.configurations import Partition

Section: TypeAlias = tuple[int, Partition]
"""A depth at which a tree is cut, and the partition that the cut makes."""


@dataclass(frozen=True)
class ConfigSpace:
    """The configurations of one machine and one model that a search may choose among."""

    tree: TopoTree
    """The machine's fundamental tree, of which groupings and removals make the space."""
    limits: OperatorLimits
    power_of_two: bool = True
    """Assumption A.3: latent structures hold 2, 4, 8, ... members."""
    uneven: UnevenCores | None = None
    """Cores of the machine that no symmetric tree describes; None: there are none."""
    nodes: tuple[int | None, ...] | None = None
    """The NUMA node of each rank (`plans.nodes_of`) that all configurations must have; None: any."""

    def generations(self, seed: int = 0) -> Iterator[list[TopoTree]]:
        """Every grouping once, fewest latent levels first, then close neighbours first, equals by the
        seed."""
        rng = Random(seed)
        by_latent: dict[int, list[tuple[int, float, TopoTree]]] = {}
        for root in self._groupings():
            widest = max((stride for _, stride, _ in root.groups), default=0)
            by_latent.setdefault(latent_levels(root), []).append((widest, rng.random(), root))
        for latent in sorted(by_latent):
            yield [root for *_, root in sorted(by_latent[latent], key=lambda entry: entry[:-1])]

    def _groupings(self) -> Iterator[TopoTree]:
        return grouped_trees(self.tree, power_of_two=self.power_of_two)

    def sections(self, tree: TopoTree) -> list[Section]:
        """The cross-sections that the operators allow, outermost first; some may be equal."""
        depths = range(tree.depth + 1)
        return [(depth, cross_section(tree, depth)) for depth in depths if self._allows(tree, depth)]

    def section(self, tree: TopoTree, depth: int) -> Partition | None:
        """The cross-section of a tree at one depth; None where the operators do not allow it."""
        return cross_section(tree, depth) if self._allows(tree, depth) else None

    def configuration(self, partition: Partition) -> Configuration:
        """The configuration that a cross-section stands for."""
        return configuration_of(self.tree.base, partition)

    def partitions(self) -> Iterator[Partition]:
        """Every distinct cross-section of the space."""
        seen: set[Partition] = set()
        for tree in every_tree(self.tree, power_of_two=self.power_of_two):
            for _, partition in self.sections(tree):
                if partition not in seen:
                    seen.add(partition)
                    yield partition

    @cached_property
    def n_configurations(self) -> int:
        """The number of different configurations."""
        return sum(1 for _ in self.partitions())

    def allows(self, configuration: Configuration) -> bool:
        """True if the model's operators can be divided between the configuration's ranks."""
        return self.limits.allows(len(configuration.ranks))

    def _allows(self, tree: TopoTree, depth: int) -> bool:
        n_ranks = prod(tree.kept[:depth])
        if not self.limits.allows(n_ranks) or self.nodes is None:
            return self.limits.allows(n_ranks)
        return n_ranks == len(self.nodes) and nodes_of(self._ranks(tree, depth)) == self.nodes

    def _ranks(self, tree: TopoTree, depth: int) -> tuple[RankCores, ...]:
        return self.configuration(cross_section(tree, depth)).ranks


def latent_levels(tree: TopoTree) -> int:
    """The number of a tree's levels that no system tool shows."""
    return sum(1 for level in tree.levels if level.kind == GROUP)
