"""From clusters to groups of the fundamental tree: the paper's machines with what their tools do not show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phasewise.topology import Kind, Machine
from phasewise.tuner.errors import TopoTreeError
from phasewise.tuner.probe.groups import (
    agreement,
    cluster_levels,
    hints_of,
    interference_levels,
    latency_levels,
    split,
)
from phasewise.tuner.topotree import fundamental
from tests.support.machines.paper_machines import epyc, kunpeng, tag_clusters, xeon
from tests.support.machines.planted_pairs import blocks, measured, nested_latencies


def _nodes(machine: Machine, kind: Kind) -> list[tuple[int, ...]]:
    return [node.cpus for node in machine.nodes(kind)]


def _kunpeng_latencies(machine: Machine, rng: np.random.Generator) -> np.ndarray:
    scales = [
        (_nodes(machine, Kind.PACKAGE), 140.0),
        (_nodes(machine, Kind.NUMA), 55.0),
        (tag_clusters(machine), 28.0),
    ]
    return measured(nested_latencies(machine.tree.cpus, scales, 300.0), rng)


@pytest.mark.parametrize("seed", range(3))
def test_kunpeng_tag_clusters_are_proposed_and_the_rest_is_known(seed: int) -> None:
    """192 cores: the clusters of four are hidden, NUMA nodes and packages are not."""
    machine = kunpeng()
    tree = fundamental(machine).tree

    levels = latency_levels(tree, machine.tree.cpus, _kunpeng_latencies(machine, np.random.default_rng(seed)))
    hint = hints_of(levels)[0]

    assert [level.known_as for level in levels] == [None, "numa", "package"]
    assert len(hints_of(levels)) == 1
    assert (hint.n, hint.t) == (4, 1)
    grouped = hint.apply(tree)
    assert grouped.kinds[hint.d - 1] == "group"
    assert grouped == tree.group(4, 1, tree.depth)


def test_epyc_l3_are_known_and_quarters_of_a_node_are_proposed() -> None:
    """Four neighbouring L3s of a 7H12 share a quarter of the I/O die, which no tool shows."""
    machine = epyc(threads_a_core=1)
    quarters = [pus for node in _nodes(machine, Kind.NUMA) for pus in blocks(node, 16)]
    scales = [(_nodes(machine, Kind.NUMA), 120.0), (quarters, 85.0), (_nodes(machine, Kind.L3), 25.0)]
    latency = measured(nested_latencies(machine.tree.cpus, scales, 220.0), np.random.default_rng(5))
    tree = fundamental(machine).tree

    levels = latency_levels(tree, machine.tree.cpus, latency)
    (hint,) = hints_of(levels)

    assert [level.known_as for level in levels] == ["l3", None, "numa"] or levels[-1].known_as == "package"
    assert (hint.n, hint.t) == (4, 1)
    assert sorted(map(set, levels[1].clusters)) == sorted(map(set, quarters))
    assert hint.apply(tree).group  # it is a group that the tree allows


def test_one_pu_of_each_core_is_enough_on_a_machine_with_smt() -> None:
    machine = epyc(threads_a_core=2)
    cores = [core[0] for core in machine.allowed_cores()]
    scales = [(_nodes(machine, Kind.NUMA), 120.0), (_nodes(machine, Kind.L3), 25.0)]
    latency = measured(nested_latencies(cores, scales, 220.0), np.random.default_rng(2))

    levels = latency_levels(fundamental(machine).tree, cores, latency)

    assert levels[0].known_as == "l3"
    assert hints_of(levels) == ()


def test_interference_shows_pairs_that_share_a_port() -> None:
    """Among a Xeon's 20 cores, neighbours with even and odd numbers share what limits their reads."""
    machine = xeon()
    node = machine.nodes(Kind.NUMA)[0].cpus
    lost = np.full((20, 20), 0.03)
    for pair in blocks(node, 2, 10):
        lost[np.ix_(pair, pair)] = 0.35
    lost += np.random.default_rng(4).normal(0.0, 0.02, lost.shape)
    np.fill_diagonal(lost, np.nan)

    (hint,) = hints_of(interference_levels(fundamental(machine).tree, node, lost, "memory"))

    assert (hint.n, hint.t) == (2, 10)
    assert hint.evidence[0].source == "memory"
    assert hint.evidence[0].within > 0.3 > hint.evidence[0].between


def test_what_two_measurements_show_comes_first() -> None:
    machine = kunpeng()
    tree = fundamental(machine).tree
    node = machine.nodes(Kind.NUMA)[0].cpus
    latency = measured(
        nested_latencies(node, [(blocks(node, 12), 40.0), (blocks(node, 4), 20.0)], 70.0),
        np.random.default_rng(0),
    )
    lost = np.full((24, 24), 0.02)
    for cluster in blocks(node, 4):
        lost[np.ix_(cluster, cluster)] = 0.3
    np.fill_diagonal(lost, np.nan)

    first, second = hints_of(
        (*latency_levels(tree, node, latency), *interference_levels(tree, node, lost, "cache"))
    )

    assert (first.n, second.n) == (4, 12)
    assert {evidence.source for evidence in first.evidence} == {"latency", "cache"}


@pytest.mark.parametrize(
    ("clusters", "reason"),
    [
        ([(0, 1, 2, 3, 4), (5, 6, 7)], "not symmetric (A.1)"),
        ([(0, 1, 4, 6), (2, 3, 5, 7)], "not tiled by a stride (A.2)"),
    ],
)
def test_clusters_that_no_group_makes_are_refused_with_the_reason(
    clusters: list[tuple[int, ...]], reason: str
) -> None:
    """Eight cores of one L3 in clusters that the assumptions exclude."""
    from tests.support.machines.paper_machines import build

    machine = build("eight", [(Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, 8)])
    latency = nested_latencies(range(8), [(clusters, 20.0)], 60.0)

    (level,) = latency_levels(fundamental(machine).tree, range(8), latency)

    assert level.hint is None
    assert level.known_as is None
    assert level.why_not is not None
    assert level.why_not.startswith(reason)


def test_a_misjudged_core_does_not_hide_a_group() -> None:
    machine = kunpeng()
    node = machine.nodes(Kind.NUMA)[0].cpus
    latency = nested_latencies(node, [(blocks(node, 12), 20.0)], 60.0)
    latency[5, :] = latency[:, 5] = 60.0  # its own thread was disturbed all along
    np.fill_diagonal(latency, np.nan)

    levels = latency_levels(fundamental(machine).tree, node, latency)
    (hint,) = hints_of(levels)

    assert (hint.n, hint.t) == (12, 1)
    assert hint.agreement < 1.0


def test_a_hint_of_another_machine_is_refused_by_the_tree() -> None:
    machine = kunpeng()
    (hint,) = hints_of(
        latency_levels(
            fundamental(machine).tree,
            machine.tree.cpus,
            _kunpeng_latencies(machine, np.random.default_rng(1)),
        )
    )

    with pytest.raises(TopoTreeError):
        hint.apply(fundamental(xeon()).tree)


GAP = math.log(1.25)
QUANTILE = 0.25


def _as_sets(clusters: object) -> set[frozenset[int]]:
    return {frozenset(cluster) for cluster in clusters}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (4, 1), (4, 6), (8, 3)])
def test_planted_clusters_are_found_under_noise(seed: int, size: int, stride: int) -> None:
    pus = range(24)
    groups = blocks(pus, size, stride)
    # The only pair of a cluster of two cannot be outvoted, so there the host has to be quieter.
    noise, disturbed = (0.04, 0.0) if size == 2 else (0.08, 0.02)
    exact = nested_latencies(pus, [(groups, 25.0)], 45.0)
    latency = measured(exact, np.random.default_rng(seed), noise, disturbed)

    (level,) = cluster_levels(np.log(latency), GAP, QUANTILE)

    assert _as_sets(level.clusters) == _as_sets(groups)
    assert math.exp(level.within) == pytest.approx(25, rel=0.1)
    assert math.exp(level.between) == pytest.approx(45, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("n", [2, 3, 8, 32])
def test_noise_alone_is_no_structure(seed: int, n: int) -> None:
    flat = measured(nested_latencies(range(n), [], 50.0), np.random.default_rng(seed))

    assert cluster_levels(np.log(flat), GAP, QUANTILE) == ()


def test_scales_nest() -> None:
    pus = range(32)
    scales = [(blocks(pus, 16), 80.0), (blocks(pus, 4), 30.0)]
    latency = measured(nested_latencies(pus, scales, 200.0), np.random.default_rng(1))

    fine, coarse = cluster_levels(np.log(latency), GAP, QUANTILE)

    assert _as_sets(fine.clusters) == _as_sets(blocks(pus, 4))
    assert _as_sets(coarse.clusters) == _as_sets(blocks(pus, 16))


@pytest.mark.parametrize("unmeasured", [0.2, 0.5])
def test_pairs_that_were_not_measured_do_not_matter_while_enough_were(unmeasured: float) -> None:
    pus = range(32)
    groups = blocks(pus, 8)
    exact = nested_latencies(pus, [(groups, 25.0)], 50.0)
    latency = measured(exact, np.random.default_rng(3), disturbed=0.0, unmeasured=unmeasured)

    (level,) = cluster_levels(np.log(latency), GAP, QUANTILE)

    assert _as_sets(level.clusters) == _as_sets(groups)


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_nothing_measured_shows_nothing(n: int) -> None:
    assert cluster_levels(np.full((n, n), np.nan), GAP, QUANTILE) == ()


def test_numbering_does_not_matter() -> None:
    """Relabelled CPUs give relabelled clusters."""
    rng = np.random.default_rng(7)
    latency = measured(nested_latencies(range(16), [(blocks(range(16), 4), 25.0)], 50.0), rng)
    order = rng.permutation(16)

    (level,) = cluster_levels(np.log(latency), GAP, QUANTILE)
    (shuffled,) = cluster_levels(np.log(latency[np.ix_(order, order)]), GAP, QUANTILE)

    assert _as_sets(tuple(order[list(c)]) for c in shuffled.clusters) == _as_sets(level.clusters)


def test_agreement_counts_pairs() -> None:
    assert agreement(((0, 1), (2, 3)), ((0, 1), (2, 3))) == 1.0
    assert agreement(((0, 1), (2, 3)), ((0, 1, 2, 3),)) == pytest.approx(2 / 6)
    assert agreement(((0,), (1,)), ((0, 1),)) == 0.0
    assert agreement(((0,), (1,)), ((0,), (1,))) == 1.0


def test_split_gives_medians_on_both_sides() -> None:
    within, between = split(nested_latencies(range(4), [(((0, 1), (2, 3)), 5.0)], 9.0), ((0, 1), (2, 3)))

    assert (within, between) == (5.0, 9.0)
