"""Every tree, once: against a naive enumerator, against the paper's bounds, and on real machines in time.

The naive enumerator has nested tuples, transformed literally as the paper defines it. A leaf is a PU; a node
is the tuple of its children, ascending by their lowest PU. Nothing of it is shared with the code under test:
closure under the transformations, with the assumptions checked on the tree that results.
PHASEWISE_SHARED_DATA names the folder of real machines.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import CpuKind, Machine, read_lstopo, read_machine
from phasewise.tuner.topotree import (
    LeftOut,
    TopoTree,
    TopoTreeError,
    every_tree,
    fundamental,
    grouped_trees,
    parents,
    parse,
    removals,
)
from phasewise.tuner.topotree.enumeration import kept_counts
from tests.support import SHARED
from tests.support.machines.machine_shapes import machine_of, nest_of
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.tiers import examples
from tests.support.topotrees import count_grouped, group_bound, removal_bound

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


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 20), (4, 2, 24), (2, 16, 4, 2)], ids=str)
def test_counts_keep_the_papers_bounds(shape: tuple[int, ...], power_of_two: bool) -> None:
    """Propositions 1 and 2."""
    tree = fundamental(machine_of(shape)).tree
    n = prod(shape)

    assert count_grouped(tree, power_of_two=power_of_two) <= group_bound(n, power_of_two=power_of_two)
    assert sum(1 for _ in transformation_tree(tree)) <= removal_bound(n)


def test_enumeration_is_lazy() -> None:
    """The first trees of a machine with millions come at once."""
    trees = every_tree(fundamental(machine_of((96,))).tree)

    assert next(trees).notation == "fundamental"
    assert next(trees).notation == "fundamental | remove(1,1)"


def _levels(machine: Machine) -> list[tuple[str, int]]:
    return [(level.kind, level.arity) for level in fundamental(machine).tree.levels]


def test_levels_without_information_collapse() -> None:
    """A package that is one NUMA node and one L3 is one level, under the name that tells most."""
    assert _levels(kunpeng()) == [("package", 4), ("numa", 2), ("core", 24)]
    assert _levels(epyc()) == [("numa", 2), ("l3", 16), ("core", 4), ("pu", 2)]
    assert _levels(xeon()) == [("numa", 2), ("core", 20)]


def test_smt_siblings_are_leaves_and_one_removal_leaves_one_a_core() -> None:
    """Both threads of a core are below it."""
    machine = epyc(threads_a_core=2)
    tree = fundamental(machine).tree

    assert tree.n_pus == 256
    assert tree.remove(1, tree.depth).pus == tuple(core[0] for core in machine.allowed_cores())


def test_only_allowed_pus_are_in_the_tree() -> None:
    """PUs that a cgroup leaves need not be symmetric; of equal parts the one that spreads most is taken."""
    machine = replace(machine_of((2, 3, 4)), allowed_pus=(*range(8), *range(12, 18)))
    regular = fundamental(machine)

    assert nest_of(regular.tree) == (((0, 1), (4, 5)), ((12, 13), (16, 17)))
    assert regular.left_out == (LeftOut("asymmetric", (2, 3, 6, 7, 14, 15)),)


def test_the_largest_part_may_cut_every_node() -> None:
    """Three cores of each node of (4, 4, 3, 3) are more than all cores of two nodes."""
    machine = replace(machine_of((4, 4)), allowed_pus=(*range(11), 12, 13, 14))
    regular = fundamental(machine)

    assert regular.tree.pus == (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14)
    assert regular.left_out == (LeftOut("asymmetric", (3, 7)),)


def test_the_thread_of_a_core_that_others_lack() -> None:
    """If one sibling may not be used, no core has two; the siblings that could be used are named as such."""
    machine = epyc(threads_a_core=2)
    regular = fundamental(replace(machine, allowed_pus=tuple(pu for pu in machine.allowed_pus if pu < 192)))

    assert regular.tree.n_pus == 128
    (left,) = regular.left_out
    assert (left.reason, left.pus) == ("smt", tuple(range(128, 192)))


def test_of_two_kinds_of_cores_one_is_used() -> None:
    """The larger kind; of equally large ones the faster, which is listed last."""
    slow, fast = CpuKind("efficiency", tuple(range(4))), CpuKind("performance", tuple(range(4, 8)))
    equal = replace(machine_of((8,)), kinds=(slow, fast))
    more_slow = replace(equal, allowed_pus=tuple(range(7)))

    assert fundamental(equal).tree.pus == fast.cpus
    assert fundamental(equal).left_out == (LeftOut("hybrid", slow.cpus),)
    assert fundamental(more_slow).tree.pus == slow.cpus


def test_no_pu_is_refused() -> None:
    """A machine none of which may be used has no tree."""
    with pytest.raises(TopoTreeError, match="none of the machine's PUs"):
        fundamental(replace(machine_of((2,)), allowed_pus=()))


@examples(60)
@given(allowed=st.sets(st.integers(0, 23), min_size=1))
def test_tree_and_left_out_are_all_that_is_allowed(allowed: set[int]) -> None:
    """Whatever a cgroup leaves, each allowed PU is in the tree or left out for a reason."""
    machine = replace(machine_of((2, 3, 4)), allowed_pus=tuple(sorted(allowed)))
    regular = fundamental(machine)
    left = [pu for part in regular.left_out for pu in part.pus]

    assert sorted([*regular.tree.pus, *left]) == sorted(allowed)
    assert regular.tree.n_pus >= max(len(allowed & set(range(start, start + 4))) for start in range(0, 24, 4))


FILES = sorted((SHARED / "hwloc").glob("*.xml"))
needs_files = pytest.mark.skipif(
    not FILES, reason=f"no machines in {SHARED}/hwloc: set PHASEWISE_SHARED_DATA to have them"
)


def _check(machine: Machine) -> None:
    """Every tree once, its notation leads back to it, and no more than the paper's bounds."""
    regular = fundamental(machine)
    tree = regular.tree
    left = [pu for part in regular.left_out for pu in part.pus]
    assert sorted([*tree.pus, *left]) == sorted(machine.allowed_pus)
    n_grouped = count_grouped(tree)
    assert n_grouped <= group_bound(tree.n_pus)
    seen = set()
    for number, each_tree in enumerate(every_tree(tree)):
        assert each_tree.key not in seen
        seen.add(each_tree.key)
        if number % 101 == 0:
            assert parse(each_tree.notation, machine) == each_tree
    assert len(seen) <= n_grouped * removal_bound(tree.n_pus)


@needs_files
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_machine_at_hand_has_its_trees(path: Path) -> None:
    """Whatever lstopo wrote: symmetric, hybrid, with offline PUs, with memory without CPUs."""
    _check(read_lstopo(path))


@pytest.mark.many
@needs_files
@pytest.mark.parametrize(
    "path",
    sorted((SHARED / "hwloc").glob("*.tar.bz2"), key=lambda path: path.stat().st_size),
    ids=lambda path: path.stem,
)
def test_every_snapshot_at_hand_has_its_trees(path: Path, tmp_path: Path) -> None:
    """sysfs as the kernel of a real machine showed it. Links that point outside are left out."""
    with tarfile.open(path) as tar:
        members = [member for member in tar.getmembers() if member.isdir() or member.isfile()]
        tar.extractall(tmp_path, members=members, filter="data")

    _check(read_machine(tmp_path / path.name.removesuffix(".tar.bz2")))


@pytest.mark.parametrize("machine", [epyc(), kunpeng()], ids=lambda machine: machine.source)
def test_the_papers_largest_machines(machine: Machine) -> None:
    """256 PUs in 4 levels, and 192 cores in 8 nodes."""
    _check(machine)
