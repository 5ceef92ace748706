"""Allocator of blocks in one range of slots, neighbours joined when they come back.

What ended requests have computed can be taken over as long as possible (decisions 0120 and 0136): slots that
nobody had go first, then those that were given back longest ago; among equal ones it goes round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from phasewise.serving.pools.contract import ALIGNMENT, PoolError

NEVER_USED, STALE = 0, 1
"""Times before all others: of slots that nobody had, and of those whose content has moved."""
MOST_PARTS = 128
"""Parts that are told apart: neighbours of which the later is oldest become one."""


class FreePart(NamedTuple):
    """Free slots that were given back at one time, or no later."""

    base: int
    end: int
    time: int


class Freed:
    """All free slots of an arena."""

    def __init__(self, n_slots: int) -> None:
        self._parts = [FreePart(0, n_slots, NEVER_USED)]  # by base

    @property
    def parts(self) -> tuple[FreePart, ...]:
        return tuple(self._parts)

    def add(self, base: int, end: int, time: int) -> None:
        """Add slots that were given back."""
        self._parts.insert(bisect_left(self._parts, (base,)), FreePart(base, end, time))
        if len(self._parts) > MOST_PARTS:
            self._join()

    def remove(self, base: int, end: int) -> None:
        """Remove slots that are taken."""
        first = bisect_left(self._parts, (base + 1,)) - 1
        last = bisect_left(self._parts, (end,))
        cut = self._parts[first:last]
        rest = [FreePart(part.base, base, part.time) for part in cut[:1] if part.base < base] + [
            FreePart(end, part.end, part.time) for part in cut[-1:] if part.end > end
        ]
        self._parts[first:last] = rest

    def places(self, base: int, end: int, length: int) -> Iterator[tuple[int, int]]:
        """The places within these free slots at which `length` slots can begin, where a part does: the latest
        time within them, and their base."""
        parts = self._parts
        for first in range(bisect_left(parts, (base,)), len(parts)):
            begin, last, time = parts[first]
            stop, number = begin + length, first
            if stop > end:
                return
            while last < stop:
                number += 1
                _, last, other = parts[number]
                time = max(time, other)
            yield time, begin

    def time(self, base: int, end: int) -> int:
        """The latest time within these free slots."""
        first = bisect_left(self._parts, (base + 1,)) - 1
        latest = NEVER_USED
        for begin, _, time in self._parts[first:]:
            if begin >= end:
                break
            latest = max(latest, time)
        return latest

    def has_unused(self, n_slots: int) -> bool:
        """True if nobody ever had so many slots in a row."""
        return any(part.time == NEVER_USED and part.end - part.base >= n_slots for part in self._parts)

    def _join(self) -> None:
        """Join two neighbouring parts, those of the least value."""
        pairs = [
            (max(left.time, right.time), index)
            for index, (left, right) in enumerate(zip(self._parts, self._parts[1:], strict=False))
            if left.end == right.base and min(left.time, right.time) > NEVER_USED
        ]
        if pairs:
            time, index = min(pairs)
            left, right = self._parts[index : index + 2]
            self._parts[index : index + 2] = [FreePart(left.base, right.end, time)]


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


Bucket: TypeAlias = int | None
"""Its index among the bounds; None: the large bucket."""


class Shelves:
    """One free list for each bucket and length of block. They never withhold: whenever the arena has no room
    for a block, all that lies here goes back to it first."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._idle: dict[tuple[Bucket, int], deque[tuple[Block, int]]] = {}
        """Each with the time at which it came back."""
        self._n_idle_slots = 0

    @property
    def n_free(self) -> int:
        return self.arena.n_free + self._n_idle_slots

    def take(self, bucket: Bucket, n_slots: int, room_slots: int = 0) -> Block | None:
        """A block of `n` slots (rounded up): one that nobody had, else of this bucket's list, if any waits
        there, the one that has waited longest, so that what it held can be read as long as possible. Else as
        `Arena.take`."""
        idle = self._idle.get((bucket, aligned(n_slots)))
        if idle and not self.arena.has_unused(n_slots):
            block, _ = idle.popleft()
            self._n_idle_slots -= block.n_slots
            return block
        slot = self.arena.take(n_slots, room_slots)
        if slot is None and self._n_idle_slots:
            self.clear()
            slot = self.arena.take(n_slots, room_slots)
        return slot

    def keep(self, bucket: Bucket, block: Block) -> None:
        """Shelve a block for the next request of this bucket."""
        self._idle.setdefault((bucket, block.n_slots), deque()).append((block, self.arena.now()))
        self._n_idle_slots += block.n_slots

    def clear(self) -> None:
        """Give all idle blocks back to the arena."""
        for idle in self._idle.values():
            for block, time in idle:
                self.arena.give(block, time)
        self._idle.clear()
        self._n_idle_slots = 0

    def blocks(self) -> Iterator[Block]:
        """The idle blocks."""
        for idle in self._idle.values():
            yield from (block for block, _ in idle)

    def largest_free(self) -> int:
        """The length of the longest block that can be taken now."""
        longest = run = end = 0
        for block in sorted([*self.arena.gaps(), *self.blocks()]):
            run = run + block.n_slots if block.base == end else block.n_slots
            end = block.end
            longest = max(longest, run)
        return longest
