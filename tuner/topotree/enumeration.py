"""Every tree of a machine, lazily: all groupings of the fundamental tree, and the removals of each.

Groupings of different levels are independent, so the grouped trees are the product over levels of each
level's chains. The trees under one grouping form a lattice: at each depth any number of the children may
stay, from 1 to all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from phasewise.tuner.topotree.tree import Chain, TopoTree, active, chains


def grouped_trees(tree: TopoTree, *, power_of_two: bool = True) -> Iterator[TopoTree]:
    """Every distinct grouping of a fundamental tree, itself first. `power_of_two`: assumption A.3."""
    base = tree.base
    for combination in product(*(chains(arity, power_of_two) for arity in base.arities)):
        arities = tuple(arity for chain in combination for arity in chain.arities)
        yield TopoTree(base, combination, arities, _steps(combination))


def _steps(combination: tuple[Chain, ...]) -> tuple[tuple[int, int, int], ...]:
    """The groups, inner levels first, so that no group moves a level that is still to be grouped."""
    return tuple(
        (size, stride, depth)
        for depth, chain in reversed(list(enumerate(combination, start=1)))
        for size, stride in chain.steps
    )


def removals(tree: TopoTree) -> Iterator[TopoTree]:
    """The children of a tree in the transformation tree: one child fewer at one depth, outer depths first."""
    for depth, kept in enumerate(tree.kept, start=1):
        if kept > 1:
            yield tree.remove(1, depth)


def parents(tree: TopoTree) -> Iterator[TopoTree]:
    """The trees of which this one is a removal, with one child more at one depth; none for a grouped tree."""
    for level, (kept, arity) in enumerate(zip(tree.kept, tree.arities, strict=True)):
        if kept < arity:
            more = (*tree.kept[:level], kept + 1, *tree.kept[level + 1 :])
            yield TopoTree(tree.base, tree.chains, more, tree.groups)


def every_tree(tree: TopoTree, *, power_of_two: bool = True) -> Iterator[TopoTree]:
    """Every distinct tree of a fundamental tree by groupings and removals, each after its parents. Two trees
    are equal if at every level of the machine the same siblings are active and nest alike. Levels are
    independent, so the distinct trees are the product over levels."""
    base = tree.base
    outermost, *inner = base.arities or (1,)
    nests_inside = [_distinct_nests(arity, power_of_two) for arity in inner]
    for first in nests(outermost, power_of_two):
        for rest in product(*nests_inside):
            combination = (first, *rest) if base.arities else ()
            nested = tuple(chain for chain, _ in combination)
            kept = tuple(count for _, counts in combination for count in counts)
            yield TopoTree(base, nested, kept, _steps(nested))


def nests(n: int, power_of_two: bool) -> Iterator[tuple[Chain, tuple[int, ...]]]:
    """The distinct ways in which some of `n` siblings nest: a chain, and the kept children by level."""
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for chain in chains(n, power_of_two):
        for kept in kept_counts(chain.arities):
            telling = tuple(count for count in kept if count > 1)
            key = (telling, active(chain, kept))
            if key not in seen:
                seen.add(key)
                yield chain, kept


@lru_cache(maxsize=64)
def _distinct_nests(n: int, power_of_two: bool) -> tuple[tuple[Chain, tuple[int, ...]], ...]:
    return tuple(nests(n, power_of_two))


def kept_counts(arities: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The numbers of children that may stay at each depth, from all to one, larger sums first."""
    counts = product(*(range(arity, 0, -1) for arity in arities))
    return sorted(counts, key=sum, reverse=True)
