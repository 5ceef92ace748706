"""Every tree, once: against a naive enumerator, against the paper's bounds, and on real machines in time."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest

from phasewise.tuner.topotree import (
    TopoTree,
    count_grouped,
    every_tree,
    fundamental,
    group_bound,
    grouped_trees,
    parents,
    removal_bound,
    removals,
)
from phasewise.tuner.topotree.enumeration import kept_counts
from tests.support.machines.machine_shapes import machine_of, nest_of
from tests.support.machines.naive_trees import (
    canonical,
    every_grouping,
    every_removal,
    is_ordered,
    leaves,
    symmetric,
)

MAX_CORES = 16


def _shapes(n: int) -> Iterator[tuple[int, ...]]:
    """All arities, outer first, of machines of `n` PUs whose every level tells something."""
    for outer in range(2, n + 1):
        if n % outer == 0:
            yield from ((outer, *inner) for inner in _shapes(n // outer))
    if n == 1:
        yield ()


def transformation_tree(root: TopoTree) -> Iterator[TopoTree]:
    """A tree and all that removals make of it, each once, parents before children."""
    for kept in kept_counts(root.kept):
        yield TopoTree(root.base, root.chains, kept, root.groups)


SHAPES = [shape for n in range(2, MAX_CORES + 1) for shape in _shapes(n)]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_the_trees_are_those_of_the_naive_enumerator(shape: tuple[int, ...], power_of_two: bool) -> None:
    """All trees of up to 16 cores, strides and removals included, each once and with a key of its own."""
    tree = fundamental(machine_of(shape)).tree
    groupings = every_grouping(symmetric(shape), power_of_two)

    grouped = [nest_of(grouped_tree) for grouped_tree in grouped_trees(tree, power_of_two=power_of_two)]
    every = list(every_tree(tree, power_of_two=power_of_two))

    assert len(grouped) == len(groupings) == count_grouped(tree, power_of_two=power_of_two)
    assert set(grouped) == groupings
    nests = [canonical(nest_of(each_tree)) for each_tree in every]
    assert len(set(nests)) == len(nests) == len({each_tree.key for each_tree in every})
    assert set(nests) == every_removal(groupings)


@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 12), (2, 2, 8)], ids=str)
def test_equal_nests_have_equal_keys_and_no_others(shape: tuple[int, ...]) -> None:
    """The key is the same exactly where the same PUs nest in the same way, over all ways to get there."""
    keys: dict[object, set[str]] = {}
    nests: dict[str, set[object]] = {}
    for grouping in grouped_trees(fundamental(machine_of(shape)).tree, power_of_two=False):
        for tree in transformation_tree(grouping):
            nest = canonical(nest_of(tree))
            keys.setdefault(nest, set()).add(tree.key)
            nests.setdefault(tree.key, set()).add(nest)

    assert all(len(of_nest) == 1 for of_nest in keys.values())
    assert all(len(of_key) == 1 for of_key in nests.values())


@pytest.mark.parametrize("shape", [(12,), (2, 8), (2, 3, 2), (2, 2, 2, 2)], ids=str)
def test_the_transformation_tree_is_in_topological_order(shape: tuple[int, ...]) -> None:
    """Every tree comes after all its parents, once; children and parents are each other's inverse."""
    for grouping in grouped_trees(fundamental(machine_of(shape)).tree):
        seen: set[TopoTree] = set()
        for tree in transformation_tree(grouping):
            assert seen.issuperset(parents(tree))
            assert all(tree in set(parents(child)) for child in removals(tree))
            assert tree not in seen
            seen.add(tree)

        assert len(seen) == grouping.n_pus


@pytest.mark.parametrize("shape", [(24,), (2, 8), (4, 2, 6)], ids=str)
def test_every_tree_comes_after_its_parents(shape: tuple[int, ...]) -> None:
    """Over all groupings, where the parents of a tree may have been met under another one."""
    seen: set[TopoTree] = set()
    for tree in every_tree(fundamental(machine_of(shape)).tree, power_of_two=False):
        assert seen.issuperset(parents(tree))
        seen.add(tree)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 20), (4, 2, 24), (2, 16, 4, 2)], ids=str)
def test_counts_keep_the_papers_bounds(shape: tuple[int, ...], power_of_two: bool) -> None:
    """Propositions 1 and 2."""
    tree = fundamental(machine_of(shape)).tree
    n = prod(shape)

    assert count_grouped(tree, power_of_two=power_of_two) <= group_bound(n, power_of_two=power_of_two)
    assert sum(1 for _ in transformation_tree(tree)) <= removal_bound(n)


def test_fewer_groups_with_a_power_of_two_and_none_that_is_not() -> None:
    """A.3 only leaves trees out."""
    tree = fundamental(machine_of((2, 12))).tree
    with_a3 = set(grouped_trees(tree))
    without = set(grouped_trees(tree, power_of_two=False))

    assert with_a3 < without
    assert all(size.bit_count() == 1 for grouped in with_a3 for size, _, _ in grouped.groups)


def test_enumeration_is_lazy() -> None:
    """The first trees of a machine with millions come at once."""
    trees = every_tree(fundamental(machine_of((96,))).tree)

    assert next(trees).notation == "fundamental"
    assert next(trees).notation == "fundamental | remove(1,1)"


@pytest.mark.parametrize("shape", [(6, 2), (2, 12), (16,)], ids=str)
def test_children_ascend_by_their_lowest_pu(shape: tuple[int, ...]) -> None:
    """Right-most is well defined: it is the child with the highest lowest PU."""
    for tree in grouped_trees(fundamental(machine_of(shape)).tree, power_of_two=False):
        assert is_ordered(nest_of(tree))
        assert tuple(sorted(tree.pus)) == tuple(leaves(nest_of(tree))) == tuple(range(prod(shape)))
