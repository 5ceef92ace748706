"""First-fit allocator: one range of slots, cut into blocks, neighbours joined when they come back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from phasewise.serving.pools.contract import ALIGNMENT, PoolError


class Block(NamedTuple):
    """Slots base .. base + n_slots - 1."""

    base: int
    n_slots: int

    @property
    def end(self) -> int:
        return self.base + self.n_slots


def aligned(n_slots: int) -> int:
    """Slots of the shortest block that holds `n` slots."""
    return -(-n_slots // ALIGNMENT) * ALIGNMENT


class Arena:
    """The free slots. A block is given back exactly as it was taken."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots // ALIGNMENT * ALIGNMENT
        if self.n_slots < 1:
            raise PoolError(f"a pool needs at least {ALIGNMENT} slots, not {n_slots}")
        self._gaps = [Block(0, self.n_slots)]  # by base; never two that touch
        self.n_free = self.n_slots

    def gaps(self) -> tuple[Block, ...]:
        """Free ranges, ascending; no two touch."""
        return tuple(self._gaps)

    def take(self, n_slots: int) -> Block | None:
        """The lowest free block of `n` slots (rounded up), or None while no gap is long enough."""
        length = aligned(n_slots)
        for index, gap in enumerate(self._gaps):
            if gap.n_slots >= length > 0:
                return self._cut(index, length)
        return None

    def give(self, block: Block) -> None:
        """Take `block` back, and join it with the gaps on either side."""
        index = bisect_left(self._gaps, block)
        base, end = block.base, block.end
        if index < len(self._gaps) and self._gaps[index].base == end:
            end = self._gaps.pop(index).end
        if index > 0 and self._gaps[index - 1].end == base:
            base = self._gaps.pop(index - 1).base
            index -= 1
        self._gaps.insert(index, Block(base, end - base))
        self.n_free += block.n_slots

    def extend(self, block: Block, n_slots: int) -> Block | None:
        """`block` with more slots at its end, where those are free."""
        length = aligned(n_slots) - block.n_slots
        index = bisect_left(self._gaps, Block(block.end, 0))
        if index < len(self._gaps):
            gap = self._gaps[index]
            if gap.base == block.end and gap.n_slots >= length:
                self._cut(index, length)
                return Block(block.base, block.n_slots + length)
        return None

    def move(self, block: Block, n_slots: int) -> Block | None:
        """A longer block for `block`, which it may overlap; None, and nothing changed, if none fits."""
        self.give(block)
        slot = self.take(n_slots)
        if slot is None:
            self.claim(block)
        return slot

    def claim(self, block: Block) -> None:
        """Take exactly `block`, all of which must be free."""
        index = bisect_left(self._gaps, Block(block.base + 1, 0)) - 1
        gap = self._gaps[index]
        rest = (Block(gap.base, block.base - gap.base), Block(block.end, gap.end - block.end))
        self._gaps[index : index + 1] = [side for side in rest if side.n_slots]
        self.n_free -= block.n_slots

    def check(self, taken: Iterable[Block]) -> None:
        """Raise, with the numbers, unless gaps and `taken` together are every slot once."""
        position = 0
        for block in sorted([*self._gaps, *taken]):
            if block.base != position or block.n_slots % ALIGNMENT or block.n_slots < 1:
                raise PoolError(f"slots from {min(position, block.base)}: expected {position}, found {block}")
            position = block.end
        if position != self.n_slots:
            raise PoolError(f"free and used slots end at {position}, not at {self.n_slots}")
        for left, right in pairwise(self._gaps):
            if left.end >= right.base:
                raise PoolError(f"gaps {left} and {right} are not joined")
        if self.n_free != sum(gap.n_slots for gap in self._gaps):
            raise PoolError(f"{self.n_free} free slots were counted, but the gaps are {self._gaps}")

    def _cut(self, index: int, n_slots: int) -> Block:
        gap = self._gaps[index]
        if gap.n_slots == n_slots:
            del self._gaps[index]
        else:
            self._gaps[index] = Block(gap.base + n_slots, gap.n_slots - n_slots)
        self.n_free -= n_slots
        return Block(gap.base, n_slots)
