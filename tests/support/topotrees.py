"""Neighbours of trees, their numbers and the paper's bounds on them, and the configurations of some trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import exp2, factorial, log2, prod

from phasewise.tuner.topotree import (
    Configuration,
    OperatorLimits,
    TopoTree,
    configuration_of,
    cross_section,
)
from phasewise.tuner.topotree.configurations import Partition
from phasewise.tuner.topotree.tree import chains


def removals(tree: TopoTree) -> Iterator[TopoTree]:
    """The children of a tree in the transformation tree: one child fewer at one depth, outer depths first."""
    for depth, kept in enumerate(tree.kept, start=1):
        if kept > 1:
            yield tree.remove(1, depth)


def parents(tree: TopoTree) -> Iterator[TopoTree]:
    """The trees of which this one is a removal: one child more at one depth. A grouped tree has none."""
    for level, (kept, arity) in enumerate(zip(tree.kept, tree.arities, strict=True)):
        if kept < arity:
            more = (*tree.kept[:level], kept + 1, *tree.kept[level + 1 :])
            yield TopoTree(tree.base, tree.chains, more, tree.groups)


def count_grouped(tree: TopoTree, *, power_of_two: bool = True) -> int:
    """The number of groupings of a fundamental tree, without making them."""
    return prod(len(chains(arity, power_of_two)) for arity in tree.base.arities)


def group_bound(n: int, *, power_of_two: bool = True) -> float:
    """Proposition 1: the most groupings of `n` PUs.

    Without A.3 it is n^n / (n - 1)!. With A.3 the paper prints n^(log2(n) / 2) over the same factorial, which
    is less than one from n = 4 on, although the ungrouped tree always exists; the product that it bounds, (7)
    of the appendix over powers of two, has the numerator alone, and so has this.
    """
    if power_of_two:
        return exp2(log2(n) ** 2 / 2)
    return float(n**n // factorial(n - 1))


def removal_bound(n: int) -> int:
    """Proposition 2: the most trees by removals from one grouped tree of `n` PUs. Under A.1 they are exactly
    the product of the arities, which is n."""
    return n * n


def configurations(tree: TopoTree, limits: OperatorLimits) -> tuple[Configuration, ...]:
    """The distinct cross-sections of a tree that the operators allow, outermost first."""
    return tuple(every_configuration((tree,), limits))


def every_configuration(trees: Iterable[TopoTree], limits: OperatorLimits) -> Iterator[Configuration]:
    """The distinct configurations of trees of one machine, in the order met."""
    seen: set[Partition] = set()
    for tree in trees:
        for depth in range(tree.depth + 1):
            if not limits.allows(prod(tree.kept[:depth])):
                continue
            partition = cross_section(tree, depth)
            if partition not in seen:
                seen.add(partition)
                yield configuration_of(tree.base, partition)
