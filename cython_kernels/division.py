"""The division of a program between ranks: each has a contiguous range of panels of every weight, and of the
KV heads.
No sum over inputs is ever cut, so that a step's result does not depend on the division, bit for bit. Ranks
with more threads get more; where cores are of several kinds, those whose cores are faster (decision 0158).

More ranks than KV heads share these: each has some query heads of one, and a copy of its keys and values
(decision 0148). C (group/division.h) divides heads by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phasewise.cython_kernels.packing import PANEL, PackedWeight

Teams = tuple[tuple[int, ...], ...]

RANK_STEPS = 20
"""Steps in which ranks' cores are weighed, the fastest core having this weight.

Coarse, so that a rank has as many columns after every start, by which its schedules are found.
"""


@dataclass(frozen=True, slots=True)
class Division:
    """The teams of a program's ranks, and the rank of this process. teams: for each table of schedules, the
    threads of its ranks; rank: which one this process is. weights: of the ranks of each table; (): as many as
    their threads."""

    teams: Teams
    rank: int
    weights: Teams = ()

    def shares(self, table: int) -> tuple[int, ...]:
        """The numbers in proportion to which the ranks of a table divide panels and heads."""
        return (self.weights or self.teams)[table]

    def panels(self, packed: PackedWeight, table: int) -> tuple[int, int]:
        """The panels of a weight that this rank computes."""
        return share(packed.panels, self.shares(table), self.rank)

    def weight(self, packed: PackedWeight, table: int) -> PackedWeight | None:
        """This rank's panels as a weight of their own; None: it has none."""
        return columns(packed, *self.panels(packed, table))

    def heads(self, n_heads: int, n_kv_heads: int, table: int) -> HeadShare:
        """The heads that this rank attends to."""
        return head_share(n_heads, n_kv_heads, self.shares(table), self.rank)


def weights(rates: Sequence[float], full: int) -> list[int]:
    """Whole weights in proportion to rates, the largest `full` and none zero; all alike where none was
    measured."""
    most = max(rates)
    return [max(1, round(full * rate / most)) if most > 0 else full for rate in rates]


def weights_of_ranks(sizes: Sequence[int], rates: Sequence[float]) -> tuple[int, ...]:
    """Weights of ranks that have `sizes` cores each. rates: of the kind of each core, rank by rank."""
    own = iter(weights(rates, RANK_STEPS))
    return tuple(sum(next(own) for _ in range(size)) for size in sizes)


def share(count: int, weights: Sequence[int], rank: int) -> tuple[int, int]:
    """The range of a rank's panels or heads among `count`: (begin, end), empty for a rank that takes no
    part."""
    total, before = sum(weights), sum(weights[:rank])
    if rank >= len(weights):
        return 0, 0
    return count * before // total, count * (before + weights[rank]) // total


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's share of attention: its KV heads, and `queries` query heads of each of them."""

    begin: int
    end: int
    queries: int
    copy: int = 0
    """The copy of the KV head that the rank reads, of those that ranks keep which share the head."""
    n_sharers: int = 1

    @property
    def n_kv_heads(self) -> int:
        return self.end - self.begin

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.queries


def head_share(n_heads: int, n_kv_heads: int, weights: Sequence[int], rank: int) -> HeadShare:
    """A rank's KV heads with all of their query heads; of more ranks than KV heads, query heads of one."""
    group, n_ranks = n_heads // n_kv_heads, min(len(weights), n_heads)
    if len(weights) <= n_kv_heads:
        return HeadShare(*share(n_kv_heads, weights, rank), group)
    if rank >= n_ranks:
        return HeadShare(0, 0, group)
    head = rank * n_kv_heads // n_ranks
    copy, sharers = rank - _ranks_before(head, n_kv_heads, n_ranks), _sharers(head, n_kv_heads, n_ranks)
    queries = group * (copy + 1) // sharers - group * copy // sharers
    return HeadShare(head, head + 1, queries, copy, sharers)


def head_copies(n_heads: int, n_kv_heads: int, teams: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The number of copies kept of each KV head: the ranks that share it, by the table by which most do."""
    ranks = [min(len(table), n_heads) for table in teams]
    return tuple(
        max((_sharers(head, n_kv_heads, n) for n in ranks if n > n_kv_heads), default=1)
        for head in range(n_kv_heads)
    )


def _sharers(head: int, n_kv_heads: int, n_ranks: int) -> int:
    return _ranks_before(head + 1, n_kv_heads, n_ranks) - _ranks_before(head, n_kv_heads, n_ranks)


def _ranks_before(head: int, n_kv_heads: int, n_ranks: int) -> int:
    """The number of ranks that share the KV heads before this one."""
    return -(-head * n_ranks // n_kv_heads)


def columns(packed: PackedWeight, begin: int, end: int) -> PackedWeight | None:
    """A view of the panels from `begin` to `end` of a weight; None if there are none."""
    if begin >= end:
        return None
    return replace(
        packed,
        n=min(packed.n, end * PANEL) - begin * PANEL,
        values=packed.values if packed.is_sparse else packed.values[begin:end],
        offsets=None if packed.offsets is None else packed.offsets[begin:end],
        scales=None if packed.scales is None else packed.scales[begin:end],
        mins=None if packed.mins is None else packed.mins[begin:end],
    )
