"""Clusters of CPUs, from a number for each pair: hierarchical clustering by one stated rule.

The rule: clusters merge two by two, those first between which the measured pairs are nearest: by a quantile
of their distances, because a pair that the host disturbed is off by any factor. The cost of the merges rises;
where it jumps by `gap` or more, what had been merged until then is a level of clusters. A level counts if
hardly any CPU is alone in it, and if more than one cluster is left.

Distances add up in the unit in which a gap is a difference: logarithms of latencies, shares of lost
bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
"""Symmetric, of pairs; NaN where a pair was not measured, and on the diagonal."""

Partition = tuple[tuple[int, ...], ...]
"""A division of indices into clusters: every index once; clusters ascend, and so do the indices in them."""

MOST_ALONE = 0.1
"""Share of CPUs that a level may leave alone: disturbed ones, not structure."""


@dataclass(frozen=True)
class DistanceLevel:
    """One scale at which CPUs cluster: the median distance inside, and to the nearest other cluster."""

    clusters: Partition
    within: float
    between: float


def cluster_levels(distances: Matrix, gap: float, quantile: float = 0.5) -> tuple[DistanceLevel, ...]:
    """The levels at which CPUs cluster, the finest first. Empty where nothing stands out.

    `quantile`: below one half where disturbances only add to a distance.
    """
    assert distances.ndim == 2
    assert distances.shape[0] == distances.shape[1]
    levels = []
    cost = -np.inf
    for (clusters, merged), (_, next_cost) in pairwise(_merges(distances, quantile)):
        cost = max(cost, merged)
        if next_cost - cost < gap or not _is_telling(clusters):
            continue
        within, between = split(distances, clusters)
        if between - within >= gap:
            levels.append(DistanceLevel(clusters, within, between))
    return tuple(levels)


def split(distances: Matrix, clusters: Sequence[Sequence[int]]) -> tuple[float, float]:
    """The median distance of pairs within a cluster, and that of a cluster to its nearest other one.

    NaN where no such pair was measured.
    """
    inside = np.concatenate([distances[np.ix_(cluster, cluster)].ravel() for cluster in clusters])
    nearest = []
    for cluster in clusters:
        others = [_median(distances[np.ix_(cluster, other)]) for other in clusters if other is not cluster]
        measured = [distance for distance in others if not np.isnan(distance)]
        nearest += [min(measured)] if measured else []
    return _median(inside), _median(np.array(nearest))


def agreement(first: Partition, second: Partition) -> float:
    """The likeness of two partitions of the same indices: of the pairs together in either, those in both."""
    pairs = [{pair for cluster in parts for pair in _pairs(cluster)} for parts in (first, second)]
    together, either = len(pairs[0] & pairs[1]), len(pairs[0] | pairs[1])
    return together / either if either else 1.0


def _pairs(cluster: Sequence[int]) -> Iterator[tuple[int, int]]:
    ordered = sorted(cluster)
    return ((a, b) for place, a in enumerate(ordered) for b in ordered[place + 1 :])


def _is_telling(clusters: Partition) -> bool:
    alone = sum(len(cluster) == 1 for cluster in clusters)
    n = sum(map(len, clusters))
    return len(clusters) > 1 and alone <= MOST_ALONE * n


def _merges(distances: Matrix, quantile: float) -> Iterator[tuple[Partition, float]]:
    """The clusters after each merge, and its cost; at first everyone alone. Ends where no pair is known."""
    members = [[index] for index in range(len(distances))]
    linkage = np.where(np.isnan(distances), np.inf, distances)
    np.fill_diagonal(linkage, np.inf)
    yield _frozen(members), -np.inf
    for _ in range(len(distances) - 1):
        first, second = np.unravel_index(int(np.argmin(linkage)), linkage.shape)
        cost = float(linkage[first, second])
        if not np.isfinite(cost):
            return
        members[first] += members[second]
        members[second] = []
        linkage[second, :] = linkage[:, second] = np.inf
        for other, cluster in enumerate(members):
            if cluster and other != first:
                pairs = distances[np.ix_(members[first], cluster)]
                linkage[first, other] = linkage[other, first] = _quantile(pairs, quantile)
        yield _frozen(members), cost


def _quantile(pairs: Matrix, quantile: float) -> float:
    """Quantile over the measured pairs, rounded down to one of them; infinite where none was measured."""
    measured = np.sort(pairs[~np.isnan(pairs)])
    return float(measured[int(quantile * (measured.size - 1))]) if measured.size else np.inf


def _frozen(members: Sequence[Sequence[int]]) -> Partition:
    return tuple(sorted(tuple(sorted(cluster)) for cluster in members if cluster))


def _median(values: npt.NDArray[np.float64]) -> float:
    measured = values[~np.isnan(values)]
    return float(np.median(measured)) if measured.size else float("nan")
