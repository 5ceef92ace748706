"""From clusters of CPUs to what a search may try: `group(n, t, d)` of the fundamental tree.

A level of clusters is proposed only if it is symmetric and tiled by a stride (assumptions A.1 and A.2), which
is asked of the tree itself: every group that it allows is formed, and its nodes are compared with the
clusters. What the system shows already needs no group; it is named instead.

Clusters come from a number for each pair of CPUs, by one rule: clusters merge two by two, those first between
which the measured pairs are nearest: by a quantile of their distances, because a pair that the host disturbed
is off by any factor. The cost of the merges rises; where it jumps by `gap` or more, what had been merged
until then is a level of clusters. A level counts if hardly any CPU is alone in it, and if more than one
cluster is left.

Distances add up in the unit in which a gap is a difference: logarithms of latencies, shares of lost
bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from phasewise._words import percent
from phasewise.tuner.topotree import TopoTree, single_groups

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


Source = Literal["latency", "memory", "cache"]

LATENCY_GAP = 1.25
"""Ratio of latencies from which on two scales are told apart: twice what a quiet pair scatters."""

LATENCY_QUANTILE = 0.25
"""Quantile of latencies that stands for two clusters: low, since a disturbance makes a cache line later,
never earlier."""

LOST_GAP = 0.1
"""Difference from which on two scales are told apart in the share of bandwidth that two readers take from
each other."""

LEAST_COMPARED = 2 / 3
"""Least share of the comparisons of the PU with most of them that a PU needs; with fewer it would look
alone."""

LEAST_AGREEMENT = 0.9
"""Least share of pairs, together in a cluster or a group, that are in both: 1 core in 20 may be misjudged.
"""


@dataclass(frozen=True)
class LevelEvidence:
    """One measurement that shows a level: medians within clusters and to the nearest other, ns or shares
    lost.
    """

    source: Source
    within: float
    between: float

    @property
    def contrast(self) -> float:
        """The distance between inside and outside, in gaps of the rule: 1 is just enough."""
        if self.source == "latency":
            return math.log(self.between / self.within) / math.log(LATENCY_GAP)
        return (self.within - self.between) / LOST_GAP


@dataclass(frozen=True)
class GroupHint:
    """A group worth trying first: `n` nodes, `t` siblings apart, at depth `d` of the fundamental tree."""

    n: int
    t: int
    d: int
    agreement: float = 1.0
    """Agreement of the measured clusters with this group; 1 is exact."""
    evidence: tuple[LevelEvidence, ...] = field(default=())

    @property
    def notation(self) -> str:
        return f"group({self.n},{self.t},{self.d})"

    def apply(self, tree: TopoTree) -> TopoTree:
        """The tree with this group. TopoTreeError where it is not the tree that was probed."""
        return tree.group(self.n, self.t, self.d)


@dataclass(frozen=True)
class ClusterLevel:
    """Clusters of PUs that a measurement shows. At most one of `known_as` and `hint` is set, else `why_not`
    is.
    """

    clusters: Partition
    evidence: LevelEvidence
    known_as: str | None = None
    """The level of the machine that the system shows as this."""
    hint: GroupHint | None = None
    why_not: str | None = None


def latency_levels(tree: TopoTree, pus: Sequence[int], latency_ns: Matrix) -> tuple[ClusterLevel, ...]:
    """The levels that latencies show, the finest first. Row and column i are of `pus[i]`."""
    kept, latency = _compared(pus, latency_ns)
    levels = cluster_levels(np.log(latency), math.log(LATENCY_GAP), LATENCY_QUANTILE)
    return tuple(
        _named(tree, kept, level, LevelEvidence("latency", math.exp(level.within), math.exp(level.between)))
        for level in levels
    )


def interference_levels(
    tree: TopoTree, pus: Sequence[int], lost: Matrix, source: Source
) -> tuple[ClusterLevel, ...]:
    """The levels that readers' losses show. `lost[i, j]`: the share of pus[i]'s rate that is gone while
    pus[j] reads.
    """
    kept, mutual = _compared(pus, (lost + lost.T) / 2)
    levels = cluster_levels(1.0 - mutual, LOST_GAP)
    return tuple(
        _named(tree, kept, level, LevelEvidence(source, 1 - level.within, 1 - level.between))
        for level in levels
    )


def _compared(pus: Sequence[int], matrix: Matrix) -> tuple[list[int], Matrix]:
    """The PUs that were compared often enough beside those compared most, and their part of the matrix."""
    compared = (~np.isnan(matrix)).sum(axis=1)
    measured = np.flatnonzero((compared > 0) & (compared >= LEAST_COMPARED * compared.max(initial=0)))
    return [pus[int(place)] for place in measured], matrix[np.ix_(measured, measured)]


def hints_of(levels: Sequence[ClusterLevel]) -> tuple[GroupHint, ...]:
    """Each group once with all its evidence: what most measurements show first, then what stands out most."""
    by_group: dict[tuple[int, int, int], list[GroupHint]] = {}
    for level in levels:
        if level.hint is not None:
            by_group.setdefault((level.hint.n, level.hint.t, level.hint.d), []).append(level.hint)
    joined = [
        GroupHint(
            *place,
            agreement=min(hint.agreement for hint in hints),
            evidence=tuple(evidence for hint in hints for evidence in hint.evidence),
        )
        for place, hints in by_group.items()
    ]
    return tuple(sorted(joined, key=_worth, reverse=True))


def _worth(hint: GroupHint) -> tuple[int, float]:
    return len({evidence.source for evidence in hint.evidence}), max(
        evidence.contrast for evidence in hint.evidence
    )


def _named(tree: TopoTree, pus: Sequence[int], level: DistanceLevel, evidence: LevelEvidence) -> ClusterLevel:
    clusters = tuple(tuple(sorted(pus[index] for index in cluster)) for cluster in level.clusters)
    measured = frozenset(pus)
    shown = ((kind, agreement(clusters, parts)) for kind, parts in _shown(tree, measured))
    known_as, likeness = max(shown, key=lambda pair: pair[1], default=("", 0.0))
    if likeness >= LEAST_AGREEMENT:
        return ClusterLevel(clusters, evidence, known_as=known_as)
    best = max(_groups(tree, measured, clusters, evidence), key=lambda hint: hint.agreement, default=None)
    if best is not None and best.agreement >= LEAST_AGREEMENT:
        return ClusterLevel(clusters, evidence, hint=best)
    return ClusterLevel(clusters, evidence, why_not=_why_not(clusters, best))


def _why_not(clusters: Partition, nearest: GroupHint | None) -> str:
    sizes = sorted({len(cluster) for cluster in clusters})
    if len(sizes) > 1:
        return f"not symmetric (A.1): clusters of {', '.join(map(str, sizes[:6]))} PUs"
    if nearest is None:
        return "the tree allows no group"
    return (
        f"not tiled by a stride (A.2): {nearest.notation} is nearest, alike in {percent(nearest.agreement)}"
    )


def _shown(tree: TopoTree, measured: frozenset[int]) -> Iterator[tuple[str, Partition]]:
    """The levels of the tree, each with the measured PUs of its nodes, where it divides them."""
    for depth, kind in enumerate(tree.kinds, start=1):
        parts = _nodes(tree, depth, measured)
        if 1 < len(parts) < len(measured):
            yield str(kind), parts


def _groups(
    tree: TopoTree, measured: frozenset[int], clusters: Partition, evidence: LevelEvidence
) -> Iterator[GroupHint]:
    """Every group that the tree allows, with its likeness to the clusters."""
    for grouped in single_groups(tree, power_of_two=False):
        n, t, d = grouped.groups[-1]
        yield GroupHint(n, t, d, agreement(clusters, _nodes(grouped, d, measured)), (evidence,))


def _nodes(tree: TopoTree, depth: int, measured: frozenset[int]) -> Partition:
    """The measured PUs of the nodes at a depth."""
    kept = (tuple(sorted(measured.intersection(node))) for node in tree.nodes(depth))
    return tuple(sorted(part for part in kept if part))
