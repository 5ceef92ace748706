"""Service configurations: what cross-sections give, and which the operators allow."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.tuner.plans import RankCores, ServicePlan
from phasewise.tuner.topotree import (
    Configuration,
    OperatorLimits,
    TopoTree,
    configurations,
    every_configuration,
    every_tree,
    fundamental,
    parse,
)
from tests.support.machines.machine_shapes import machine_of
from tests.support.machines.paper_machines import epyc, kunpeng

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


def test_a_plan_survives_the_database() -> None:
    """A plan that the search finds is a service plan like any other."""
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
