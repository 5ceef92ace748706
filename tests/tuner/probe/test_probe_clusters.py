"""Clusters of CPUs from a number for each pair: what was planted is found, noise is no structure."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phasewise.tuner.probe.groups import agreement, cluster_levels, split
from tests.support.machines.planted_pairs import blocks, measured, nested_latencies

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
