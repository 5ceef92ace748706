"""Every tree of a machine, lazily: all groupings of the fundamental tree, and what each becomes by removals.

Groupings of different levels do not touch each other, so the grouped trees are the product over levels of
the chains of each. The trees under one grouping form a lattice: at each depth any number of the children
may stay, from 1 to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from phasewise.tuner.topotree.tree import Chain, TopoTree, active, chains


def grouped_trees(tree: TopoTree, *, power_of_two: bool = True) -> Iterator[TopoTree]:
    """Every distinct grouping of a fundamental tree, itself first. `power_of_two` is assumption A.3."""
    base = tree.base
    for combination in product(*(chains(arity, power_of_two) for arity in base.arities)):
        arities = tuple(arity for chain in combination for arity in chain.arities)
        yield TopoTree(base, combination, arities, _steps(combination))


def _steps(combination: tuple[Chain, ...]) -> tuple[tuple[int, int, int], ...]:
    """The groups, inner levels first, so that none moves a level that is still to be grouped."""
    return tuple(
        (size, stride, depth)
        for depth, chain in reversed(list(enumerate(combination, start=1)))
        for size, stride in chain.steps
    )


def every_tree(tree: TopoTree, *, power_of_two: bool = True) -> Iterator[TopoTree]:
    """Every distinct tree that groups and removals make of a fundamental tree, each after its parents. Levels
    are independent here too: two trees are equal if at every level of the machine the same siblings are
    active and nest alike. So the distinct trees are the product over levels of what is distinct at each."""
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
    """The distinct ways in which some of `n` siblings nest: a chain, and what stays at each of its levels."""
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
    """The numbers of children that may stay at each depth, any number from all to one; more come before
    fewer."""
    counts = product(*(range(arity, 0, -1) for arity in arities))
    return sorted(counts, key=sum, reverse=True)
