"""All trees of a small machine, the slow way: nested tuples, transformed literally as the paper defines it.

A leaf is a PU; a node is the tuple of its children, ascending by their lowest PU. Nothing here is shared with
the code under test: closure under the transformations, with the assumptions checked on the tree that results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

Nest = Any
"""A PU or a tuple of nests."""


def symmetric(arities: tuple[int, ...], first: int = 0) -> Nest:
    """The fundamental tree with these arities, its PUs numbered in order."""
    if not arities:
        return first
    step = prod(arities[1:])
    return tuple(symmetric(arities[1:], first + index * step) for index in range(arities[0]))


def leaves(nest: Nest) -> list[int]:
    return [nest] if isinstance(nest, int) else sorted(pu for child in nest for pu in leaves(child))


def every_grouping(nest: Nest, power_of_two: bool) -> set[Nest]:
    """The tree and all that any sequence of groups makes of it."""

    def steps(tree: Nest) -> Iterator[Nest]:
        for depth, arity in enumerate(_arities(tree), start=1):
            for size in range(2, arity):
                if not power_of_two or size in {2, 4, 8, 16, 32}:
                    for stride in range(1, arity // size + 1):
                        yield from _grouped(tree, size, stride, depth)

    return _closure({nest}, steps)


def every_removal(nests: set[Nest]) -> set[Nest]:
    """The trees and all that any sequence of removals makes of them, of equal ones one."""

    def steps(tree: Nest) -> Iterator[Nest]:
        for depth, arity in enumerate(_arities(tree), start=1):
            for n in range(1, arity):
                yield _at_depth(tree, depth - 1, lambda children, n=n: children[:-n])

    return {canonical(nest) for nest in _closure(nests, steps)}


def canonical(nest: Nest) -> Nest:
    """Without nodes of a single child, which are the same part of the machine as that child."""
    if isinstance(nest, int):
        return nest
    children = tuple(canonical(child) for child in nest)
    return children[0] if len(children) == 1 else children


def _closure(nests: set[Nest], steps: Callable[[Nest], Iterator[Nest]]) -> set[Nest]:
    nests, wave = set(nests), list(nests)
    while wave:
        wave = [new for nest in wave for new in steps(nest) if not (new in nests or nests.add(new))]
    return nests


def _grouped(tree: Nest, size: int, stride: int, depth: int) -> Iterator[Nest]:
    """The tree with groups of `size` nodes `stride` apart at `depth`; nothing where an assumption fails."""
    try:
        result = _at_depth(tree, depth - 1, lambda children: _tiled(children, size, stride))
    except ValueError:
        return
    if _is_symmetric(result) and _is_tiled(result):
        yield result


def _tiled(children: tuple[Nest, ...], size: int, stride: int) -> tuple[Nest, ...]:
    """Greedily: the first child that is free begins a group. ValueError if a member is taken or not there."""
    free = dict(enumerate(children))
    groups = []
    while free:
        first = min(free)
        try:
            groups.append(tuple(free.pop(first + member * stride) for member in range(size)))
        except KeyError:
            raise ValueError("no tiling") from None
    return tuple(sorted(groups, key=lambda group: leaves(group)[0]))


def _at_depth(tree: Nest, depth: int, change: Callable[[tuple[Nest, ...]], tuple[Nest, ...]]) -> Nest:
    """The tree with the children of every node at `depth` changed."""
    if depth == 0:
        return change(tree)
    return tuple(_at_depth(child, depth - 1, change) for child in tree)


def _arities(tree: Nest) -> list[int]:
    """The number of children of a node at each depth: trees are symmetric, so the first ones tell."""
    arities = []
    while not isinstance(tree, int):
        arities.append(len(tree))
        tree = tree[0]
    return arities


def _shape(tree: Nest) -> Nest:
    return 0 if isinstance(tree, int) else tuple(_shape(child) for child in tree)


def _is_symmetric(tree: Nest) -> bool:
    """A.1: the children of every node look the same."""
    if isinstance(tree, int):
        return True
    shapes = {_shape(child) for child in tree}
    return len(shapes) == 1 and all(_is_symmetric(child) for child in tree)


def _is_tiled(tree: Nest) -> bool:
    """A.2, strictly: the PUs of every child of a node are those of its first child, shifted."""
    if isinstance(tree, int):
        return True
    sets = [leaves(child) for child in tree]
    shifts = [{b - a for a, b in zip(sets[0], child_pus, strict=True)} for child_pus in sets]
    return all(len(shift) == 1 for shift in shifts) and all(_is_tiled(child) for child in tree)


def is_ordered(tree: Nest) -> bool:
    """True if the children of every node ascend by their lowest PU."""
    if isinstance(tree, int):
        return True
    firsts = [leaves(child)[0] for child in tree]
    return all(a < b for a, b in pairwise(firsts)) and all(is_ordered(child) for child in tree)
