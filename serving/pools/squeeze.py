"""Compaction: choose which blocks to move, and where, to join scattered free slots. Pure.

Copies within one memory are cheap beside a step that reads all weights and every key and value. So what is
free can be used wherever it lies. Moved are neighbours of one gap after the other until there is room, those
whose slots are fewest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from phasewise.serving.pools.arena import Block


class Shift(NamedTuple):
    """A copy from `source` to `target`, as long as it was; the two may overlap."""

    source: Block
    target: int


def opened(blocks: Sequence[Block], n_slots: int, needed: int) -> tuple[list[Shift], int] | None:
    """Shifts, in order, after which `needed` slots are free in one run, and where that begins. blocks: all
    that are held, ascending, among `n_slots`. None where too little is free."""
    ends = [0, *(block.end for block in blocks)]
    gaps = [base - end for end, base in zip(ends, [*(block.base for block in blocks), n_slots], strict=True)]
    held = _sums(blocks)
    best: tuple[int, int, int] | None = None
    free = last = 0
    for first in range(len(gaps)):  # the gaps first .. last - 1 become one
        while free < needed and last < len(gaps):
            free += gaps[last]
            last += 1
        if free < needed:
            break
        cost = held[last - 1] - held[first]
        if best is None or cost < best[0]:
            best = cost, first, last
        free -= gaps[first]
    if best is None:
        return None
    _, first, last = best
    shifts, end = _packed(blocks[first : last - 1], ends[first])
    return shifts, end


def enlarged(blocks: Sequence[Block], n_slots: int, growing: int, needed: int) -> list[Shift] | None:
    """Shifts, in order, after which `needed` slots are free behind the block of index `growing`. It may be
    shifted itself. None where too little is free."""
    start = blocks[growing]
    walls = [*(block.base for block in blocks[growing + 1 :]), n_slots]
    after, before = _sums(blocks[growing + 1 :]), _sums(blocks[:growing])
    reach = [wall - held for wall, held in zip(walls, after, strict=True)]  # never falls
    best: tuple[int, int, int] | None = None
    for first in range(growing + 1, -1, -1):  # the blocks first .. growing are packed to the left
        base, cost = start.base, 0
        if first <= growing:
            cost = before[growing] - before[first] + start.n_slots
            base = _end_before(blocks, first) + cost - start.n_slots
        count = bisect_left(reach, base + start.n_slots + needed)
        if count < len(reach) and (best is None or cost + after[count] < best[0]):
            best = cost + after[count], first, count
    if best is None:
        return None
    _, first, count = best
    shifts, _ = _packed(blocks[first : growing + 1], _end_before(blocks, first))
    edge = walls[count]
    for block in reversed(blocks[growing + 1 : growing + 1 + count]):
        edge -= block.n_slots
        if edge != block.base:
            shifts.append(Shift(block, edge))
    return shifts


def _end_before(blocks: Sequence[Block], index: int) -> int:
    return blocks[index - 1].end if index else 0


def _sums(blocks: Sequence[Block]) -> list[int]:
    """Running sums of the blocks' slots, from 0 on."""
    return [0, *accumulate(block.n_slots for block in blocks)]


def _packed(blocks: Sequence[Block], end: int) -> tuple[list[Shift], int]:
    """Each block as low as it can lie above `end`, and the end of the last."""
    shifts = []
    for block in blocks:
        if block.base != end:
            shifts.append(Shift(block, end))
        end += block.n_slots
    return shifts, end
