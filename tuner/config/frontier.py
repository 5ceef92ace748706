"""The search frontier: the state of a walk and the configurations that it may ask for next (`walk.py` has the
rules and the order)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import TypeAlias

from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.topotree import GROUP, Configuration, TopoTree
from phasewise.tuner.topotree.configurations import Partition

PATIENCE = 40
"""Consecutive results of a group that do not improve on its best, after which the group is given up."""

FAR = 1.25
"""A cost above this many times the best cost is far from it."""

FAR_MISSES = 4
"""A far result counts as this many results without improvement."""

WORTH = 0.997
"""A cost above this share of another does not beat it: a gain of 0.3 % is noise."""

SURVEYED_SECTIONS = 3
"""Number of the fundamental tree's best cross-sections that are surveyed under each grouping."""

FEW = 32
"""Fewest configurations that are evaluated, however small the space is."""

Group: TypeAlias = tuple[int, tuple[int | None, ...]]


@dataclass(frozen=True)
class Rules:
    """Rules that limit what the walk asks for, and the seed that orders equals."""

    pruning: bool = True
    patience: int | None = PATIENCE
    """Results without improvement after which a group is given up; None: never."""
    share: float | None = 0.1
    """Largest share of all configurations to evaluate; at least `FEW` are. None: no limit."""
    seed: int = 0
    batch: int = 6
    """Configurations asked for at once, which processes that search together may divide."""


@dataclass(frozen=True)
class Candidate:
    """A configuration to evaluate, and its place in the walk."""

    configuration: Configuration
    tree: TopoTree
    parent: TopoTree | None
    """The tree from which one removal made this tree; None: all PUs are active."""
    rival: Configuration | None
    """The parent's configuration at the same cross-section, which this configuration has to beat."""
    uneven: str = ""
    """The cores gained or lost beside the rival, in words, where no tree has these cores."""

    @property
    def notation(self) -> str:
        """The tree's notation, followed by the cores that no tree has."""
        return f"{self.tree.notation} | {self.uneven}" if self.uneven else self.tree.notation


@dataclass(frozen=True)
class PrunedTree:
    """A tree that did not beat its parent at a cross-section, so that its descendants there are skipped."""

    tree: TopoTree
    parent: TopoTree
    ranks: int
    cost_ms: float
    parent_cost_ms: float


@dataclass(frozen=True)
class Stopped:
    """The decision to give up a group of configurations."""

    ranks: int
    numa_nodes: tuple[int | None, ...]
    best_ms: float


Decision: TypeAlias = PrunedTree | Stopped


class Interest(IntEnum):
    """Priorities of strands in the queue, most urgent first."""

    SURVEY = 0
    HOPEFUL = 1
    HOPELESS = 2
    """A removal before it did not beat its parent; asked for only without pruning, after all others."""


@dataclass(frozen=True, slots=True)
class _Strand:
    """One cross-section of a tree, and the removal by which the walk reached it."""

    tree: TopoTree
    depth: int
    partition: Partition
    place: int
    """The grouping's place in the order of its generation."""
    interest: Interest
    parent: _Strand | None = None


@dataclass
class _Patience:
    """The patience left for a group of configurations."""

    best_ms: float = math.inf
    misses: int = 0
    is_stopped: bool = False

    def count(self, cost_ms: float, best_of_all_ms: float) -> None:
        """Count one more result. A result far from the best of all counts as several."""
        improves = cost_ms < WORTH * self.best_ms
        if cost_ms > FAR * best_of_all_ms:
            self.misses += FAR_MISSES
        else:
            self.misses = 0 if improves else self.misses + 1


_Entry: TypeAlias = tuple[Interest, float, int, int, int, int, _Strand]
"""A strand in the queue: interest, parent's cost, removal's order, grouping's order, serial number."""


class Frontier:
    """The costs known so far, the strands that wait, and the decisions."""

    def __init__(self, space: ConfigSpace, rules: Rules) -> None:
        self._space = space
        self._rules = rules
        self._known_ms: dict[Partition, float] = {}
        self._section_ms: dict[Partition, float] = {}
        self._groups: dict[Group, _Patience] = {}
        self._best_ms = math.inf
        self._queue: list[_Entry] = []
        self._serial = count()
        self._asked: list[tuple[_Strand, Configuration]] = []
        self._followed: dict[tuple[str, Partition], Interest] = {}
        self._decided: list[Decision] = []
        share = rules.share
        self._left = math.inf if share is None else max(FEW, int(share * space.n_configurations))

    def open(self, roots: Sequence[TopoTree], is_surveyed: bool) -> None:
        """Begin a generation of groupings, and reset the patience of groups not far from the best."""
        for group in self._groups.values():
            if group.best_ms <= FAR * self._best_ms:
                group.misses, group.is_stopped = 0, False
        interest = Interest.SURVEY if is_surveyed else Interest.HOPEFUL
        for place, root in enumerate(roots):
            for depth, partition in self._space.sections(root):
                self._consider(_Strand(root, depth, partition, place, interest), (0, 0))

    def next_batch(self, least: Interest) -> list[Candidate]:
        """The next configurations to evaluate, of at least this interest; empty when none is left."""
        self._asked = []
        met_twice: list[_Entry] = []
        in_batch: set[Partition] = set()
        while (
            self._queue and self._queue[0][0] <= least and len(in_batch) < min(self._rules.batch, self._left)
        ):
            entry = heapq.heappop(self._queue)
            strand = entry[-1]
            if strand.partition in self._known_ms:
                self._judge(strand)
            elif strand.partition in in_batch:
                met_twice.append(entry)
            else:
                self._ask(strand, in_batch)
        for entry in met_twice:
            heapq.heappush(self._queue, entry)
        self._left -= len(self._asked)
        return [self._candidate(strand, configuration) for strand, configuration in self._asked]

    def take(self, costs_ms: Sequence[float]) -> None:
        """Take the costs of the last batch, and queue the strands that follow."""
        for (strand, configuration), cost_ms in zip(self._asked, costs_ms, strict=True):
            self._known_ms[strand.partition] = cost_ms
            self._best_ms = min(self._best_ms, cost_ms)
            if strand.tree == self._space.tree:
                self._section_ms[strand.partition] = cost_ms
            self._count(configuration, cost_ms, strand.interest)
            self._judge(strand)

    def decided(self) -> tuple[Decision, ...]:
        """Return the search's decisions since the last call, and forget them."""
        decided, self._decided = tuple(self._decided), []
        return decided

    def _ask(self, strand: _Strand, in_batch: set[Partition]) -> None:
        configuration = self._space.configuration(strand.partition)
        if not self._groups.setdefault(configuration.group, _Patience()).is_stopped:
            in_batch.add(strand.partition)
            self._asked.append((strand, configuration))

    def _candidate(self, strand: _Strand, configuration: Configuration) -> Candidate:
        parent = strand.parent
        if parent is None:
            return Candidate(configuration, strand.tree, None, None)
        return Candidate(configuration, strand.tree, parent.tree, self._space.configuration(parent.partition))

    def _count(self, configuration: Configuration, cost_ms: float, interest: Interest) -> None:
        group = self._groups[configuration.group]
        if self._rules.patience is not None and interest is not Interest.SURVEY:
            group.count(cost_ms, self._best_ms)
            if group.misses >= self._rules.patience and not group.is_stopped:
                group.is_stopped = True
                self._decided.append(Stopped(*configuration.group, min(cost_ms, group.best_ms)))
        group.best_ms = min(group.best_ms, cost_ms)

    def _consider(self, strand: _Strand, removal: tuple[int, int]) -> None:
        """Judge a strand whose cost is known, else queue it. Roots come before all removals."""
        if strand.partition in self._known_ms:
            self._judge(strand)
            return
        parent_ms = self._known_ms[strand.parent.partition] if strand.parent else 0.0
        entry = (strand.interest, parent_ms, *removal, strand.place, next(self._serial), strand)
        heapq.heappush(self._queue, entry)

    def _judge(self, strand: _Strand) -> None:
        """Follow a strand if it beats its parent, or if pruning is off."""
        if self._beats_parent(strand):
            self._follow(strand, max(strand.interest, Interest.HOPEFUL))
        elif not self._rules.pruning:
            self._follow(strand, Interest.HOPELESS)

    def _beats_parent(self, strand: _Strand) -> bool:
        parent = strand.parent
        if parent is None:
            return True
        cost_ms, parent_ms = self._known_ms[strand.partition], self._known_ms[parent.partition]
        if cost_ms < WORTH * parent_ms:
            return True
        if self._rules.pruning:
            ranks = math.prod(strand.tree.kept[: strand.depth])
            self._decided.append(PrunedTree(strand.tree, parent.tree, ranks, cost_ms, parent_ms))
        return False

    def _follow(self, strand: _Strand, interest: Interest) -> None:
        """Queue the removals of a strand; if it was followed before, only if the interest is higher now."""
        met = strand.tree.key, strand.partition
        if self._followed.get(met, math.inf) <= interest:
            return
        self._followed[met] = interest
        for removal, depth, tree in _removals(strand.tree):
            partition = self._space.section(tree, strand.depth)
            if partition is not None:
                its_interest = Interest.SURVEY if self._is_surveyed(strand, depth) else interest
                child = _Strand(tree, strand.depth, partition, strand.place, its_interest, strand)
                self._consider(child, removal)

    def _is_surveyed(self, strand: _Strand, depth: int) -> bool:
        """True if a removal at this depth belongs to the survey: just below a grouping's latent levels."""
        if strand.interest is not Interest.SURVEY or strand.parent is not None:
            return False
        kinds = strand.tree.kinds
        if GROUP in kinds and depth != kinds.index(GROUP) + 2:
            return False
        cost_ms = self._section_ms.get(strand.partition)
        better = [other for other in self._section_ms.values() if cost_ms is not None and other < cost_ms]
        return cost_ms is not None and len(better) < SURVEYED_SECTIONS


def _removals(tree: TopoTree) -> Iterator[tuple[tuple[int, int], int, TopoTree]]:
    """The removals of one child or of half of the children: order, depth, and the tree that is left."""
    for depth, kept in enumerate(tree.kept, start=1):
        for coarse, n in enumerate(dict.fromkeys((1, kept // 2))):
            if 1 <= n < kept:
                yield (coarse, -depth), depth, tree.remove(n, depth)
