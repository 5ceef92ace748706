"""Every tree of a machine, lazily: all groupings of the fundamental tree, and what each becomes by removals.

Groupings of different levels do not touch each other, so the grouped trees are the product over levels of
the chains of each. The trees under one grouping form a lattice: at each depth any number of the children
may stay, from 1 to all. `removals` and `parents` are neighbours in it, one child apart; remove(n, d) is n
such steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from phasewise.tuner.errors import TopoTreeError
from phasewise.tuner.topotree.group_chains import Chain, chains
from phasewise.tuner.topotree.tree import TopoTree


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


def single_groups(tree: TopoTree, *, power_of_two: bool = True) -> Iterator[TopoTree]:
    """The trees that one group makes of this one; `groups[-1]` of each says which."""
    for depth, arity in enumerate(tree.arities, start=1):
        for size in range(2, arity):
            if power_of_two and size.bit_count() != 1:
                continue
            for stride in range(1, arity // size + 1):
                try:
                    yield tree.group(size, stride, depth)
                except TopoTreeError:
                    continue


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


def transformation_tree(root: TopoTree) -> Iterator[TopoTree]:
    """A tree and all that removals make of it, each once, in topological order: parents before children.

    No two of them are equal: how many stay at each depth is what tells which PUs do.
    """
    counts = product(*(range(kept, 0, -1) for kept in root.kept))
    for kept in sorted(counts, key=sum, reverse=True):
        yield TopoTree(root.base, root.chains, kept, root.groups)


def distinct(trees: Iterable[TopoTree]) -> Iterator[TopoTree]:
    """The trees that are equal to none before."""
    seen: set[str] = set()
    for tree in trees:
        if tree.key not in seen:
            seen.add(tree.key)
            yield tree


def every_tree(tree: TopoTree, *, power_of_two: bool = True) -> Iterator[TopoTree]:
    """Every distinct tree that groups and removals make of a fundamental tree, each after its parents."""
    return distinct(
        each
        for grouping in grouped_trees(tree, power_of_two=power_of_two)
        for each in transformation_tree(grouping)
    )
