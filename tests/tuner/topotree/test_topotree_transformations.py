"""Group and remove keep their promises, their notation is reversible, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.tuner.plans import RankCores, ServicePlan
from phasewise.tuner.topotree import (
    Configuration,
    OperatorLimits,
    TopoTree,
    TopoTreeError,
    every_tree,
    fundamental,
    grouped_trees,
    parse,
)
from tests.support.machines.machine_shapes import machine_of, nest_of
from tests.support.machines.paper_machines import epyc, kunpeng
from tests.support.topotrees import configurations, every_configuration

SHAPES = [(2,), (4,), (6,), (2, 4), (2, 2, 4), (3, 4, 2), (2, 12), (4, 2, 8)]


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], TopoTree]:
    """A shape, and a tree of its machine: any grouping, then any removals."""
    shape = draw(st.sampled_from(SHAPES))
    groupings = list(grouped_trees(fundamental(machine_of(shape)).tree, power_of_two=False))
    tree = draw(st.sampled_from(groupings))
    for _ in range(draw(st.integers(0, 4))):
        depth = draw(st.integers(1, tree.depth))
        if tree.kept[depth - 1] > 1:
            tree = tree.remove(draw(st.integers(1, tree.kept[depth - 1] - 1)), depth)
    return shape, tree


@settings(deadline=None)
@given(shape_and_tree=trees())
def test_the_notation_is_reversible(shape_and_tree: tuple[tuple[int, ...], TopoTree]) -> None:
    """Every tree can be made again from what is printed of it, to the last field."""
    shape, tree = shape_and_tree

    again = parse(tree.notation, machine_of(shape))

    assert again == tree
    assert hash(again) == hash(tree)
    assert (again.levels, again.pus, again.notation) == (tree.levels, tree.pus, tree.notation)


@settings(deadline=None)
@given(shape_and_tree=trees())
def test_a_tree_is_its_levels_and_its_pus(shape_and_tree: tuple[tuple[int, ...], TopoTree]) -> None:
    """Levels multiply to the machine before removals and to the active PUs after."""
    shape, tree = shape_and_tree

    assert prod(level.arity for level in tree.levels) == prod(shape)
    assert prod(level.kept for level in tree.levels) == tree.n_pus == len(set(tree.pus))


@settings(deadline=None)
@given(shape_and_tree=trees(), data=st.data())
def test_removals_commute_and_add_up(
    shape_and_tree: tuple[tuple[int, ...], TopoTree], data: st.DataObject
) -> None:
    """remove(n, d) is n removals of one, in any order with removals elsewhere, and takes PUs away only."""
    _, tree = shape_and_tree
    removable = [depth for depth, kept in enumerate(tree.kept, start=1) if kept > 1]
    if not removable:
        return
    first, second = data.draw(st.sampled_from(removable)), data.draw(st.sampled_from(removable))
    n = data.draw(st.integers(1, tree.kept[first - 1] - 1))

    removed = tree.remove(n, first)

    one_by_one = tree
    for _ in range(n):
        one_by_one = one_by_one.remove(1, first)
    assert one_by_one == removed
    assert set(removed.pus) < set(tree.pus)
    assert nest_of(removed) != nest_of(tree)
    if first != second:
        assert removed.remove(1, second) == tree.remove(1, second).remove(n, first)


def test_nodes_are_cut_from_the_pus() -> None:
    """The PU sets of a level, in tree order, as they are after removals."""
    tree = fundamental(machine_of((2, 4))).tree.group(2, 2, 2).remove(1, 3)

    assert tree.nodes(0) == ((0, 1, 4, 5),)
    assert tree.nodes(2) == tree.nodes(3) == ((0,), (1,), (4,), (5,))


@pytest.mark.parametrize(
    ("notation", "names"),
    [
        ("group(4,1,1)", "fundamental"),
        ("fundamental | grop(4,1,1)", "grop"),
        ("fundamental | group(4,1)", r"group\(n,stride,depth\)"),
        ("fundamental | remove(1,2,3)", r"remove\(n,depth\)"),
        ("fundamental | group(5,1,2)", r"group\(5,1,2\) .* 12"),
        ("fundamental | group(1,1,2)", "2 <= n"),
        ("fundamental | group(12,1,2)", "n < 12"),
        ("fundamental | group(4,0,2)", r"group\(4,0,2\)"),
        ("fundamental | group(4,5,2)", "divide 12"),
        ("fundamental | group(4,1,3)", "depths 1 to 2"),
        ("fundamental | remove(1,0)", "depths 1 to 2"),
        ("fundamental | remove(12,2)", "leave at least 1"),
        ("fundamental | remove(0,2)", "at least 1"),
        ("fundamental | remove(1,2) | group(4,1,2)", "too late"),
        ("fundamental | group(2,2,2) | group(3,1,2)", "A.2"),
        ("fundamental" + " | remove(1,1)" * 99, "more than"),
        ("fundamental | remove(999999999999999999999,1)", "neither"),
        ("", "fundamental"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(notation: str, names: str) -> None:
    """The message names the step and what would be legal."""
    with pytest.raises(TopoTreeError, match=names) as caught:
        parse(notation, machine_of((4, 12)))

    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


DEFAULT_MODEL = OperatorLimits(n_heads=9, n_kv_heads=3, head_dim=64, ffn=1536)
WIDE = OperatorLimits(n_heads=64, n_kv_heads=64, head_dim=128, ffn=11008)


def test_the_papers_figure_6() -> None:
    """144 cores are 8 ranks of 18 cut at the NUMA nodes, or 48 of 3 cut at the latent groups."""
    tree = parse("fundamental | group(4,1,3) | remove(1,4)", kunpeng())

    by_ranks = {len(configuration.ranks): configuration for configuration in configurations(tree, WIDE)}

    assert list(by_ranks) == [1, 4, 8]
    wider = {
        len(configuration.ranks): configuration
        for configuration in configurations(tree, replace(WIDE, n_kv_heads=144))
    }
    assert {len(rank.cores) for rank in by_ranks[8].ranks} == {18}
    assert [rank.numa_node for rank in by_ranks[8].ranks] == list(range(8))
    assert [rank.numa_node for rank in by_ranks[4].ranks] == [None] * 4
    assert {len(rank.cores) for rank in wider[48].ranks} == {3}
    assert by_ranks[8].n_pus == wider[48].n_pus == 144


def test_ranks_share_the_active_pus_evenly() -> None:
    """The ranks of every configuration have equally many PUs, none twice, all of the tree's and no other."""
    for tree in islice(every_tree(fundamental(epyc()).tree), 0, 6000, 97):
        for configuration in configurations(tree, replace(WIDE, n_kv_heads=256)):
            cores = [pu for rank in configuration.ranks for pu in rank.cores]
            assert sorted(cores) == sorted(tree.pus)
            assert len({len(rank.cores) for rank in configuration.ranks}) == 1
            assert configuration.group == (
                len(configuration.ranks),
                tuple(rank.numa_node for rank in configuration.ranks),
            )


def _naive(trees: list[TopoTree], limits: OperatorLimits) -> set[frozenset[frozenset[int]]]:
    """Configurations as sets of sets, by cutting the PUs of each tree into equal runs."""
    as_sets = set()
    for tree in trees:
        n_ranks = 1
        for kept in (1, *tree.kept):
            n_ranks *= kept
            size = tree.n_pus // n_ranks
            if limits.allows(n_ranks):
                runs = (tree.pus[start : start + size] for start in range(0, tree.n_pus, size))
                as_sets.add(frozenset(map(frozenset, runs)))
    return as_sets


@pytest.mark.parametrize("shape", [(12,), (2, 8), (2, 2, 4), (3, 2, 2)], ids=str)
def test_equivalent_configurations_are_met_once(shape: tuple[int, ...]) -> None:
    """Over all trees of a machine: each set of ranks once, and the cheap key tells what the ranks tell."""
    trees = list(every_tree(fundamental(machine_of(shape)).tree, power_of_two=False))

    met = list(every_configuration(trees, WIDE))

    as_sets = [frozenset(frozenset(rank.cores) for rank in configuration.ranks) for configuration in met]
    assert len(set(as_sets)) == len(as_sets) == len({configuration.key for configuration in met})
    assert set(as_sets) == _naive(trees, WIDE)


def test_a_configuration_is_the_same_however_it_is_written() -> None:
    """The order of ranks and of cores does not count, which cores go together does."""
    configuration = Configuration((RankCores((0, 1)), RankCores((2, 3))))

    assert configuration.key == Configuration((RankCores((3, 2)), RankCores((0, 1)))).key
    assert configuration.key != Configuration((RankCores((0, 2)), RankCores((1, 3)))).key
    assert configuration.key != Configuration((RankCores((0, 1, 2, 3)),)).key


def test_a_configuration_is_a_service_plan_like_any_other() -> None:
    configuration = configurations(fundamental(kunpeng()).tree, WIDE)[-1]
    plan = configuration.plan("decode", "search")

    assert ServicePlan.from_json(plan.to_json(), "search") == plan
    assert Configuration(plan.ranks).key == configuration.key


def test_the_default_model_runs_in_as_many_ranks_as_it_has_query_heads() -> None:
    """Three KV heads: 2 + 1 is faster than 3 in one, 1 + 1 + 1 faster still; more share them."""
    assert [n for n in range(12) if DEFAULT_MODEL.allows(n)] == list(range(1, 10))
    assert "10 ranks cannot share 9 query heads" in str(DEFAULT_MODEL.reason(10))


def test_ranks_that_hold_whole_kv_heads_are_no_more_than_shrink_the_largest_share() -> None:
    """Of eight KV heads: five ranks have two at most, as four have. From nine on they are shared."""
    limits = OperatorLimits(n_heads=16, n_kv_heads=8, head_dim=64, ffn=1536)
    assert [n for n in range(20) if limits.allows(n)] == [1, 2, 3, 4, 8, *range(9, 17)]


@given(
    n_kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    ffn=st.integers(1, 4096),
    n=st.integers(0, 70),
)
def test_operator_limits_allow_what_makes_the_largest_share_smaller(
    n_kv_heads: int, head_dim: int, ffn: int, n: int
) -> None:
    """Whatever the paper's rule allows is allowed where panels permit; a rank that could rest is not."""
    limits = OperatorLimits(n_kv_heads, n_kv_heads, head_dim, ffn)
    panels_permit = head_dim % 16 == 0 and ffn >= 32 * n

    assert limits.allows(1)
    assert limits.allows(n) == (limits.reason(n) is None)
    if n > 1 and n_kv_heads % n == 0:
        assert limits.allows(n) == panels_permit
    if n > 1 and limits.allows(n):
        assert -(-n_kv_heads // n) < -(-n_kv_heads // (n - 1))
