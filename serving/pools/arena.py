"""Allocator of blocks in one range of slots, neighbours joined when they come back.

What ended requests have computed can be taken over as long as possible (decisions 0120 and 0136): slots that
nobody had go first, then those that were given back longest ago; among equal ones it goes round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from phasewise.serving.pools.contract import ALIGNMENT, PoolError
from phasewise.serving.pools.freed import NEVER_USED, STALE, Freed


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
        self._freed = Freed(self.n_slots)
        self._now = STALE
        """Times at which blocks were given back so far."""
        self.n_free = self.n_slots
        self._next = 0
        """The end of the block that was taken last, or of the room behind it."""

    def gaps(self) -> tuple[Block, ...]:
        """Free ranges, ascending; no two touch."""
        return tuple(self._gaps)

    def take(self, n_slots: int, room_slots: int = 0) -> Block | None:
        """A free block of `n` slots (rounded up); None while no gap is long enough. One that nobody had goes
        before one that has `room_slots` to grow into, and this before one that was given back earlier."""
        length = aligned(n_slots)
        if length < 1:
            return None
        room = max(length, aligned(room_slots))
        best = min(
            (
                (time > NEVER_USED, gap.end - base < room, time, (base - self._next) % self.n_slots, base)
                for gap in self._gaps
                if gap.n_slots >= length
                for time, base in self._places(gap, length)
            ),
            default=None,
        )
        if best is None:
            return None
        _, lacks_room, _, _, base = best
        block = Block(base, length)
        self.claim(block)
        self._next = block.end if lacks_room else base + room
        return block

    def _places(self, gap: Block, length: int) -> Iterator[tuple[int, int]]:
        """The places in a gap at which a block may begin, each with the time of what lies there."""
        yield from self._freed.places(gap.base, gap.end, length)
        if gap.base < self._next <= gap.end - length:
            yield self._freed.time(self._next, self._next + length), self._next

    def has_unused(self, n_slots: int) -> bool:
        """True if nobody ever had a block of `n` slots that is free."""
        return self._freed.has_unused(aligned(n_slots))

    def now(self) -> int:
        """A time after all others, for `give`."""
        self._now += 1
        return self._now

    def give(self, block: Block, time: int | None = None) -> None:
        """Take `block` back, and join it with the gaps on either side. time: at which its request ended;
        None: now."""
        self._freed.add(block.base, block.end, self.now() if time is None else time)
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
                self.claim(Block(block.end, length))  # it goes round from where it was
                return Block(block.base, block.n_slots + length)
        return None

    def move(self, block: Block, n_slots: int, room_slots: int = 0) -> Block | None:
        """A longer block for `block`, which it may overlap; None, and nothing changed, if none fits."""
        self.give(block, STALE)
        slot = self.take(n_slots, room_slots)
        if slot is None:
            self.claim(block)
        return slot

    def claim(self, block: Block) -> None:
        """Take exactly `block`, all of which must be free."""
        index = bisect_left(self._gaps, Block(block.base + 1, 0)) - 1
        gap = self._gaps[index]
        rest = (Block(gap.base, block.base - gap.base), Block(block.end, gap.end - block.end))
        self._gaps[index : index + 1] = [side for side in rest if side.n_slots]
        self._freed.remove(block.base, block.end)
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
        self._check_parts()
        if self.n_free != sum(gap.n_slots for gap in self._gaps):
            raise PoolError(f"{self.n_free} free slots were counted, but the gaps are {self._gaps}")

    def _check_parts(self) -> None:
        gaps = list[Block]()
        for base, end, _ in self._freed.parts:
            if gaps and gaps[-1].end == base:
                base = gaps.pop().base
            gaps.append(Block(base, end - base))
        if gaps != self._gaps:
            raise PoolError(f"gaps {self._gaps} are not the parts {self._freed.parts}")
