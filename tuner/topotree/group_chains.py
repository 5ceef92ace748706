"""All ways to group the siblings of one level into nested, isomorphic clusters.

The siblings are positions 0 .. n - 1 in the order of their lowest CPU number. Grouping takes the nodes of a
parent `size` at a time, `stride` apart; from the innermost level outwards this reaches every nest, each once.
Legal nests follow from the paper's assumptions (section 5.2): every cluster has the same shape (A.1), the
children of a node are translates of its first child (A.2; taken literally, a stride of one satisfies it
always, so it is read as the strict form that its name says), and with A.3 sizes are powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod


@dataclass(frozen=True)
class Chain:
    """One nest of clusters. `arities` are its levels', outer first; their product is how many siblings.

    `order` has the siblings in the order of the tree: a node is a run of it, its lowest sibling first.
    `steps` are the (size, stride) by which the innermost-first enumeration came here.
    """

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
    """The chain, then all that group its outermost nodes further."""
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
    """True if the clusters are translates of each other, as their nodes are; `lowest`: each node's."""
    shapes = {tuple(lowest[node] - lowest[cluster[0]] for node in cluster) for cluster in clusters}
    return len(shapes) == 1
