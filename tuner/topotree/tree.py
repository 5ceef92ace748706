"""TopoTree: the active PUs, and their nesting in shared resources (the paper's section 5).

A tree is symmetric: all nodes of a depth look alike. So it is stored as one `Level` per depth and, for each
level of the machine, the order of its siblings. Depth 0 is the machine, and the deepest nodes are PUs (or
cores of one PU). `group` guesses at sharing that the system does not show; `remove` makes PUs inactive.

`chains` are all ways to group the siblings of one level into nested, isomorphic clusters. Siblings are
positions 0 .. n - 1 in the order of their lowest CPU number. Grouping takes the nodes of a parent `size` at a
time, `stride` apart; from the innermost level outwards this reaches every nest once. Legal nests follow from
the paper's assumptions (section 5.2): every cluster has the same shape (A.1), the children of a node are
translates of its first child (A.2; taken literally, a stride of one always satisfies it, so it is read in the
strict sense of its name), and with A.3 sizes are powers of two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from phasewise.topology import Kind
from phasewise.tuner.errors import TopoTreeError

GROUP = "group"
"""The kind of a level that no system tool shows."""

PREFERENCE = (
    *(kind.value for kind in (Kind.NUMA, Kind.PACKAGE, Kind.CORE, Kind.L3, Kind.CLUSTER, Kind.L2)),
    *(kind.value for kind in (Kind.DIE, Kind.L4, Kind.PU)),
    GROUP,
)
"""Level names, preferred first, for a node of several levels, such as a package that is one NUMA node."""


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth: each node above has `arity` of them, of which the first `kept` are active."""

    kind: str
    arity: int
    kept: int


@dataclass(frozen=True)
class SymmetricMachine:
    """The symmetric machine that all trees of a search share: its levels, and its PUs in tree order."""

    kinds: tuple[str, ...]
    arities: tuple[int, ...]
    pus: tuple[int, ...]
    numa_nodes: tuple[int | None, ...]
    """The NUMA node of each PU, in tree order."""

    @cached_property
    def digest(self) -> bytes:
        text = repr((self.kinds, self.arities, self.pus, self.numa_nodes))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """PUs in one node of each level; a PU's index is the sum of position times weight over levels."""
        return tuple(prod(self.arities[level + 1 :]) for level in range(len(self.arities)))


def preferred(kinds: tuple[str, ...]) -> str:
    """The preferred name of a node that belongs to the levels `kinds`."""
    return min(kinds, key=PREFERENCE.index)


@dataclass(frozen=True)
class Chain:
    """One nest of clusters. `arities`: of its levels, outer first; their product is the number of siblings.
    `order`: the siblings in tree order: a node is a run, its lowest sibling first. `steps`: the (size,
    stride) of each grouping, innermost first."""

    arities: tuple[int, ...]
    order: tuple[int, ...]
    steps: tuple[tuple[int, int], ...] = ()


def ungrouped(n: int) -> Chain:
    return Chain((n,), tuple(range(n)))


@lru_cache(maxsize=256)
def chains(n: int, power_of_two: bool) -> tuple[Chain, ...]:
    """Every legal nest over `n` siblings, the ungrouped one first."""
    return tuple(_from(ungrouped(n), power_of_two))


def _from(chain: Chain, power_of_two: bool) -> Iterator[Chain]:
    """The chain, then all chains that group its outermost nodes further."""
    yield chain
    n_nodes = chain.arities[0]
    for size in range(2, n_nodes):
        if n_nodes % size or (power_of_two and size.bit_count() != 1):
            continue
        for stride in range(1, n_nodes // size + 1):
            longer = grouped(chain, 0, size, stride)
            if longer is not None:
                yield from _from(longer, power_of_two)


def grouped(chain: Chain, level: int, size: int, stride: int) -> Chain | None:
    """The chain with the nodes at `level` of each parent grouped; None where A.1 or A.2 would not hold."""
    arity = chain.arities[level]
    if not 2 <= size < arity or arity % (size * stride):
        return None
    inside = prod(chain.arities[level + 1 :])
    clusters = _clusters(arity, size, stride)
    if not _are_translates(clusters, chain.order[: arity * inside : inside]):
        return None
    sequence = [node for cluster in clusters for node in cluster]
    order = tuple(
        chain.order[start + node * inside + offset]
        for start in range(0, len(chain.order), arity * inside)
        for node in sequence
        for offset in range(inside)
    )
    arities = (*chain.arities[:level], arity // size, size, *chain.arities[level + 1 :])
    return Chain(arities, order, (*chain.steps, (size, stride)))


def _clusters(arity: int, size: int, stride: int) -> list[range]:
    """The nodes of each cluster: `stride` interleaved clusters fill a block, and blocks fill the parent."""
    block = size * stride
    return [
        range(start + first, start + block, stride)
        for start in range(0, arity, block)
        for first in range(stride)
    ]


def _are_translates(clusters: list[range], lowest: tuple[int, ...]) -> bool:
    """True if the clusters are translates of each other. `lowest`: the lowest sibling of each node."""
    shapes = {tuple(lowest[node] - lowest[cluster[0]] for node in cluster) for cluster in clusters}
    return len(shapes) == 1


FUNDAMENTAL = "fundamental"
STEP = " | "


@dataclass(frozen=True, eq=False)
class TopoTree:
    """A tree, equal to another if the same PUs nest in the same way. `groups`: the transformations (n,
    stride, depth) in the order applied."""

    base: SymmetricMachine
    chains: tuple[Chain, ...]
    kept: tuple[int, ...]
    groups: tuple[tuple[int, int, int], ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopoTree) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def arities(self) -> tuple[int, ...]:
        """The number of children of a node at each depth before removals, root first."""
        return tuple(arity for chain in self.chains for arity in chain.arities)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of the nodes of each depth from 1 on."""
        return _kinds(self.base.kinds, tuple(len(chain.arities) for chain in self.chains))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels below the root, outer to inner."""
        return tuple(map(Level, self.kinds, self.arities, self.kept))

    @property
    def depth(self) -> int:
        """The depth of the deepest nodes."""
        return len(self.kept)

    @property
    def n_pus(self) -> int:
        return prod(self.kept)

    @cached_property
    def active(self) -> tuple[tuple[int, ...], ...]:
        """The active siblings of each level of the machine, in tree order."""
        return tuple(
            active(chain, kept) for chain, kept in zip(self.chains, self.kept_by_chain(), strict=True)
        )

    @property
    def pus(self) -> tuple[int, ...]:
        """The active PUs, in tree order."""
        places = (sum(part) for part in product(*self._weighted_positions()))
        return tuple(self.base.pus[place] for place in places)

    def _weighted_positions(self) -> Iterator[list[int]]:
        for weight, positions in zip(self.base.weights, self.active, strict=True):
            yield [position * weight for position in positions]

    def nodes(self, depth: int) -> tuple[tuple[int, ...], ...]:
        """The active PUs of each node at `depth`, in tree order; the one node at depth 0 holds them all."""
        pus = self.pus
        size = prod(self.kept[depth:])
        return tuple(pus[start : start + size] for start in range(0, len(pus), size))

    def kept_by_chain(self) -> Iterator[tuple[int, ...]]:
        """For each level of the machine, the kept counts of the levels into which grouping has divided it."""
        start = 0
        for chain in self.chains:
            yield self.kept[start : start + len(chain.arities)]
            start += len(chain.arities)

    @cached_property
    def key(self) -> str:
        """A digest of structure and PUs, equal exactly for equal trees. It is Merkle's fold over isomorphic
        children: a level is a kind and a count, and nodes differ by the PUs below them; levels of single
        children are skipped."""
        text = repr((_telling(self.kinds, self.kept), self.active))
        return hashlib.blake2b(text.encode(), digest_size=16, key=self.base.digest).hexdigest()

    @property
    def notation(self) -> str:
        """The transformations that make this tree, e.g. `fundamental | group(4,1,3) | remove(1,4)`."""
        steps = [f"group({size},{stride},{depth})" for size, stride, depth in self.groups]
        for depth, (arity, kept) in enumerate(zip(self.arities, self.kept, strict=True), start=1):
            if kept < arity:
                steps.append(f"remove({arity - kept},{depth})")
        return STEP.join([FUNDAMENTAL, *steps])

    def group(self, n: int, t: int, d: int) -> TopoTree:
        """The tree with a new level at depth `d` whose nodes hold `n` of the nodes there, `t` siblings apart.
        Siblings count in the order of their lowest PU. TopoTreeError where the children of a node cannot be
        tiled so, or if PUs have been removed, since latent structure is the whole machine's."""
        what = f"group({n},{t},{d})"
        self._check_depth(what, d)
        if self.kept != self.arities:
            raise TopoTreeError(f"{what} comes too late: group first, then remove")
        arity = self.arities[d - 1]
        if n < 2 or t < 1 or n >= arity or arity % (n * t):
            raise TopoTreeError(
                f"{what} cannot tile the {arity} children of each node at depth {d - 1}: 2 <= n < {arity}, "
                f"and n times the stride must divide {arity}"
            )
        index, level = self._chain_at(d)
        chain = grouped(self.chains[index], level, n, t)
        if chain is None:
            raise TopoTreeError(f"{what} makes groups that are no translates of each other (assumption A.2)")
        chains = (*self.chains[:index], chain, *self.chains[index + 1 :])
        arities = tuple(arity for chain in chains for arity in chain.arities)
        return TopoTree(self.base, chains, arities, (*self.groups, (n, t, d)))

    def remove(self, n: int, d: int) -> TopoTree:
        """The tree without the `n` last children at depth `d` of every node above; one must stay."""
        what = f"remove({n},{d})"
        self._check_depth(what, d)
        kept = self.kept[d - 1]
        if not 1 <= n < kept:
            raise TopoTreeError(
                f"{what} must take at least 1 and leave at least 1 of the {kept} at depth {d}"
            )
        return TopoTree(self.base, self.chains, (*self.kept[: d - 1], kept - n, *self.kept[d:]), self.groups)

    def _check_depth(self, what: str, d: int) -> None:
        if not 1 <= d <= self.depth:
            raise TopoTreeError(
                f"{what} names a depth that is not there: the tree has depths 1 to {self.depth}"
            )

    def _chain_at(self, d: int) -> tuple[int, int]:
        """The level of the machine to which depth `d` belongs, and the level within its nest."""
        level = d - 1
        for index, chain in enumerate(self.chains):
            if level < len(chain.arities):
                return index, level
            level -= len(chain.arities)
        raise AssertionError(f"depth {d} was checked before")


def whole(base: SymmetricMachine) -> TopoTree:
    """The fundamental tree: nothing grouped, nothing removed."""
    return TopoTree(base, tuple(map(ungrouped, base.arities)), base.arities)


@lru_cache(maxsize=1 << 12)
def _kinds(base_kinds: tuple[str, ...], depths: tuple[int, ...]) -> tuple[str, ...]:
    """The kinds of all levels: for each level of the machine its groups, then its own kind."""
    return tuple(
        kind
        for base_kind, depth in zip(base_kinds, depths, strict=True)
        for kind in (*(GROUP,) * (depth - 1), base_kind)
    )


@lru_cache(maxsize=1 << 16)
def active(chain: Chain, kept: tuple[int, ...]) -> tuple[int, ...]:
    """The siblings that are left of a nest, in its order, where `kept` children stay at each level."""
    places = [0]
    inside = len(chain.order)
    for arity, count in zip(chain.arities, kept, strict=True):
        inside //= arity
        places = [place + child * inside for place in places for child in range(count)]
    return tuple(chain.order[place] for place in places)


@lru_cache(maxsize=1 << 16)
def _telling(kinds: tuple[str, ...], kept: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """The levels whose nodes have several children, each named together with levels of single children
    below."""
    merged: list[tuple[tuple[str, ...], int]] = []
    for kind, count in zip(kinds, kept, strict=True):
        if count > 1:
            merged.append(((kind,), count))
        elif merged:
            merged[-1] = ((*merged[-1][0], kind), merged[-1][1])
    return tuple((preferred(names), count) for names, count in merged)
