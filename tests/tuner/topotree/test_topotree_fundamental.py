"""From a machine to its fundamental tree: what collapses, what is left to the operating system, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import CpuKind, Machine
from phasewise.tuner.topotree import LeftOut, TopoTreeError, fundamental
from tests.support.machines.machine_shapes import machine_of, nest_of
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.tiers import examples


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


def test_one_pu_is_a_tree_of_one() -> None:
    """Nothing to group, nothing to remove."""
    machine = replace(machine_of((2, 2)), allowed_pus=(3,))
    tree = fundamental(machine).tree

    assert (tree.levels, tree.pus, tree.notation) == ((), (3,), "fundamental")


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
