"""The order in which a space is searched: a generator that asks what configurations cost and is sent answers.

It knows no clock, budget, database or evaluator. Given the same answers it asks the same questions, so
replaying what was stored resumes it, and several processes that share their answers walk in step.

What is walked are strands: one cross-section of a tree, followed through the removals of that tree. A strand
begins at every cross-section of every grouping, where all PUs are active. Three rules keep most of the space
from being asked for, each a switch:

- *Pruning*, the transformation tree (section 5.2 of the paper): a removal that does not beat what it was
  removed from loses its descendants. A tree has as many costs as cross-sections, so it is judged on each, and
  is lost when it beats its parent on none.
- *Hashing*: a cross-section that means a configuration asked before is judged by that answer; the same
  cross-section of an equal tree is followed once.
- *Patience*: configurations with the same number of ranks on the same NUMA nodes are a group. A group whose
  results stop improving is given up, sooner if they are far from the best.

The order decides how much of the space that costs. Groupings come coarse to fine, those without a latent level
first, then with one, with two; with each of these generations patience begins anew. Within, whoever descends
from the least cost is asked for next; of equals, the removal of one child or of half of them, then the others.
With a rule switched off, the questions of the walk with it are asked first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from phasewise.tuner.config.space import Space
from phasewise.tuner.topotree import GROUP, Configuration, TopoTree
from phasewise.tuner.topotree.configurations import Partition

PATIENCE = 40
"""Results of a group in a row that are no better than its best, until it is given up."""

FAR = 1.25
"""Costs above so many times the best one are far from it."""

FAR_MISSES = 4
"""So many results without improvement a far one counts for."""

WORTH = 0.997
"""A cost above so much of another does not beat it: a gain of 0.3 % is noise, or an even road without end."""

FEW = 32
"""So many configurations are worth a look however small the space is."""

SURVEYED_GENERATIONS = 2
SURVEYED_SECTIONS = 3
_SURVEY, _HOPEFUL, _HOPELESS = range(3)

Group: TypeAlias = tuple[int, tuple[int | None, ...]]


@dataclass(frozen=True)
class Rules:
    """What keeps the walk from asking for everything, and in which order equals come."""

    pruning: bool = True
    hashing: bool = True
    patience: int | None = PATIENCE
    """None: no group is given up."""
    share: float | None = 0.1
    """Of all configurations, no more are asked for (though always `FEW`). None: no limit."""
    seed: int = 0
    """Of the order of removals that nothing else distinguishes."""
    batch: int = 6
    """So many configurations are asked for at once: what processes that search together may divide."""


@dataclass(frozen=True)
class Candidate:
    """A configuration to evaluate, and where the walk met it."""

    configuration: Configuration
    tree: TopoTree
    parent: TopoTree | None
    """The tree that it came from by one removal; None: all its PUs are active."""
    rival: Configuration | None
    """The parent's configuration at the same cross-section, which this one has to beat."""


@dataclass(frozen=True)
class Cut:
    """A tree that did not beat its parent at a cross-section: its descendants there are not looked at."""

    tree: TopoTree
    parent: TopoTree
    ranks: int
    cost_ms: float
    parent_cost_ms: float


@dataclass(frozen=True)
class Stopped:
    """A group that was given up."""

    ranks: int
    numa_nodes: tuple[int | None, ...]
    best_ms: float


Decision: TypeAlias = Cut | Stopped


@dataclass(frozen=True)
class Ask:
    """Evaluate these; in any order, the answer is a cost in ms for each, in this order; inf: it cannot run."""

    candidates: tuple[Candidate, ...]
    decisions: tuple[Decision, ...]
    """What was decided since the last ask."""


Walk: TypeAlias = Generator[Ask, Sequence[float], tuple[Decision, ...]]
"""Returns the last decisions."""


def walk(space: Space, rules: Rules) -> Walk:
    """Search the space until nothing is left that the rules would ask for."""
    frontier = _Frontier(space, rules)
    for generation, roots in enumerate(space.generations()):
        frontier.open(roots, is_surveyed=generation < SURVEYED_GENERATIONS)
        least = _SURVEY if generation + 1 < SURVEYED_GENERATIONS else _HOPELESS
        while batch := frontier.next_batch(least):
            costs = yield Ask(tuple(batch), frontier.decided())
            frontier.take(costs)
    while batch := frontier.next_batch(_HOPELESS):
        costs = yield Ask(tuple(batch), frontier.decided())
        frontier.take(costs)
    return frontier.decided()


@dataclass(frozen=True, slots=True)
class _Strand:
    """A cross-section of a tree, by which removal it was reached, and whether all before it beat their parents."""

    tree: TopoTree
    depth: int
    partition: Partition
    parent: _Strand | None = None
    is_hopeful: bool = True
    is_survey: bool = False


@dataclass
class _Patience:
    """How a group is doing."""

    best_ms: float = math.inf
    misses: int = 0
    is_stopped: bool = False


@dataclass
class _Frontier:
    """What is known and what could be asked for next."""

    space: Space
    rules: Rules
    known: dict[Partition, float] = field(default_factory=dict)
    groups: dict[Group, _Patience] = field(default_factory=dict)
    best_ms: float = math.inf

    def __post_init__(self) -> None:
        self._section_costs: dict[Partition, float] = {}
        self._heap: list[tuple[Any, ...]] = []
        self._expanded: dict[tuple[str, Partition], bool] = {}
        self._asked: list[tuple[_Strand, Configuration]] = []
        self._decided: list[Decision] = []
        self._serial = 0
        self._rng = Random(self.rules.seed)
        share = self.rules.share
        self._left = math.inf if share is None else max(FEW, int(share * self.space.n_configurations))

    def open(self, roots: Sequence[TopoTree], is_surveyed: bool) -> None:
        """Begin a generation: patience anew, except for groups that are far from the best."""
        for group in self.groups.values():
            if group.best_ms <= FAR * self.best_ms:
                group.misses, group.is_stopped = 0, False
        for place, root in enumerate(roots):
            for depth, partition in self.space.sections(root):
                self._consider(_Strand(root, depth, partition, is_survey=is_surveyed), (place,))

    def next_batch(self, least: int) -> list[Candidate]:
        """The strands to evaluate next; none when the generation is over."""
        batch: list[Candidate] = []
        in_batch: set[Partition] = set()
        later: list[tuple[Any, ...]] = []
        self._asked = []
        most = min(self.rules.batch, self._left)
        while self._heap and self._heap[0][0] <= least and len(batch) < most:
            entry = heapq.heappop(self._heap)
            strand: _Strand = entry[-1]
            if self.rules.hashing and strand.partition in self.known:
                self._judge(strand)
                continue
            if self.rules.hashing and strand.partition in in_batch:
                later.append(entry)
                continue
            configuration = self.space.configuration(strand.partition)
            group = self.groups.setdefault(configuration.group, _Patience())
            if group.is_stopped:
                continue
            in_batch.add(strand.partition)
            self._asked.append((strand, configuration))
            batch.append(self._candidate(strand, configuration))
        for entry in later:
            heapq.heappush(self._heap, entry)
        self._left -= len(batch)
        return batch

    def take(self, costs: Sequence[float]) -> None:
        """The answers to the last batch."""
        for (strand, configuration), cost in zip(self._asked, costs, strict=True):
            is_new = strand.partition not in self.known
            self.known[strand.partition] = cost
            self.best_ms = min(self.best_ms, cost)
            if strand.parent is None and strand.tree == self.space.tree:
                self._section_costs[strand.partition] = cost
            if is_new:
                self._count(configuration, cost, strand.is_survey)
            self._judge(strand)

    def decided(self) -> tuple[Decision, ...]:
        """Decisions since the last call."""
        decided, self._decided = tuple(self._decided), []
        return decided

    def _candidate(self, strand: _Strand, configuration: Configuration) -> Candidate:
        parent = strand.parent
        if parent is None:
            return Candidate(configuration, strand.tree, None, None)
        rival = self.space.configuration(parent.partition)
        return Candidate(configuration, strand.tree, parent.tree, rival)

    def _count(self, configuration: Configuration, cost: float, is_survey: bool) -> None:
        group = self.groups[configuration.group]
        improves = cost < WORTH * group.best_ms
        group.best_ms = min(group.best_ms, cost)
        if self.rules.patience is None or group.is_stopped or is_survey:
            return
        if cost > FAR * self.best_ms:
            group.misses += FAR_MISSES
        else:
            group.misses = 0 if improves else group.misses + 1
        if group.misses >= self.rules.patience:
            group.is_stopped = True
            self._decided.append(Stopped(*configuration.group, group.best_ms))

    def _consider(self, strand: _Strand, order: tuple[float, ...]) -> None:
        """Judge a strand by what is known, else queue it: hopeful ones first, of the least cost."""
        if self.rules.hashing and strand.partition in self.known:
            self._judge(strand)
            return
        parent_ms = self.known[strand.parent.partition] if strand.parent else 0.0
        self._serial += 1
        rank = _SURVEY if strand.is_survey else _HOPEFUL if strand.is_hopeful else _HOPELESS
        heapq.heappush(self._heap, (rank, parent_ms, *order, self._serial, strand))

    def _judge(self, strand: _Strand) -> None:
        """Go on to the removals of a strand whose cost is known, if it beats its parent."""
        cost, parent = self.known[strand.partition], strand.parent
        beats = parent is None or cost < WORTH * self.known[parent.partition]
        if not beats and parent is not None:
            if self.rules.pruning:
                ranks = math.prod(strand.tree.kept[: strand.depth])
                parent_ms = self.known[parent.partition]
                self._decided.append(Cut(strand.tree, parent.tree, ranks, cost, parent_ms))
                return
        is_hopeful = strand.is_hopeful and beats
        key = (strand.tree.key, strand.partition)
        if self.rules.hashing and self._expanded.get(key, False) >= is_hopeful and key in self._expanded:
            return
        self._expanded[key] = is_hopeful
        for order, tree in _removals(strand.tree):
            partition = self.space.section(tree, strand.depth)
            if partition is not None:
                child = _Strand(tree, strand.depth, partition, strand, is_hopeful, self._surveys(strand, tree))
                self._consider(child, order)

    def _surveys(self, strand: _Strand, tree: TopoTree) -> bool:
        if not strand.is_survey or strand.parent is not None:
            return False
        kinds = strand.tree.kinds
        depth = next(at for at, (a, b) in enumerate(zip(strand.tree.kept, tree.kept)) if a != b)
        if GROUP in kinds and kinds.index(GROUP) + 1 != depth:
            return False
        better = sum(1 for cost in set(self._section_costs.values()) if cost < self.known[strand.partition])
        return strand.partition in self._section_costs and better < SURVEYED_SECTIONS


def _removals(tree: TopoTree) -> Iterator[tuple[tuple[float, ...], TopoTree]]:
    """The removals at one depth, each with its place in the order."""
    for depth, kept in enumerate(tree.kept, start=1):
        for coarse, n in enumerate(dict.fromkeys((1, kept // 2))):
            if 1 <= n < kept:
                yield (coarse, -depth), tree.remove(n, depth)
