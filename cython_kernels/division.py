"""The division of a program between ranks: each has a contiguous range of panels of every weight, and of the
KV heads.
No sum over inputs is ever cut, so that a step's result does not depend on the division, bit for bit. Ranks
with more threads get more; C (pw_share_of in program.h) divides KV heads by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phasewise.cython_kernels.packing import PANEL, PackedWeight

Teams = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Division:
    """teams: for each table of schedules, the threads of its ranks; rank: which one this process is."""

    teams: Teams
    rank: int

    def panels(self, packed: PackedWeight, table: int) -> tuple[int, int]:
        """The panels of a weight that this rank computes."""
        return share(packed.panels, self.teams[table], self.rank)

    def weight(self, packed: PackedWeight, table: int) -> PackedWeight | None:
        """These panels as a weight; None: there are none."""
        return columns(packed, *self.panels(packed, table))

    def heads(self, n_kv_heads: int, table: int) -> int:
        """The number of KV heads that this rank attends to."""
        begin, end = share(n_kv_heads, self.teams[table], self.rank)
        return end - begin


def share(count: int, teams: Sequence[int], rank: int) -> tuple[int, int]:
    """The share of a rank in `count` panels or heads: (begin, end), empty for a rank that takes no part."""
    total, before = sum(teams), sum(teams[:rank])
    if rank >= len(teams):
        return 0, 0
    return count * before // total, count * (before + teams[rank]) // total


def columns(packed: PackedWeight, begin: int, end: int) -> PackedWeight | None:
    """A view of some panels; None if there are none."""
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
