"""Allocator of blocks in one range of slots; freed neighbours are joined. Keys and values of ended requests
stay readable as long as possible (decisions 0120 and 0136): never-used slots are taken first, then those
freed longest ago, in round-robin order among equals."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from phasewise.serving.pools.contract import ALIGNMENT, PoolError

NEVER_USED, STALE = 0, 1
"""Freeing times before all others: of slots never used, and of slots whose content has moved."""
MOST_PARTS = 128
"""Most free parts that are told apart; beyond that the two oldest neighbours are joined."""


class FreePart(NamedTuple):
    """Free slots [base, end) that were all freed at `time` or before."""

    base: int
    end: int
    time: int


class Freed:
    """The free slots of an arena, in parts by freeing time."""

    def __init__(self, n_slots: int) -> None:
        self._parts = [FreePart(0, n_slots, NEVER_USED)]  # by base

    @property
    def parts(self) -> tuple[FreePart, ...]:
        return tuple(self._parts)

    def add(self, base: int, end: int, time: int) -> None:
        """Add slots that were freed."""
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
        """Possible bases, at the beginnings of parts, for `length` slots within free slots [base, end), each
        with the latest freeing time of its slots."""
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
        """Latest freeing time within free slots [base, end)."""
        first = bisect_left(self._parts, (base + 1,)) - 1
        latest = NEVER_USED
        for begin, _, time in self._parts[first:]:
            if begin >= end:
                break
            latest = max(latest, time)
        return latest

    def has_unused(self, n_slots: int) -> bool:
        """True if there are `n_slots` slots in a row that were never used."""
        return any(part.time == NEVER_USED and part.end - part.base >= n_slots for part in self._parts)

    def _join(self) -> None:
        """Join the two neighbouring parts that were freed longest ago."""
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
    """Slots `base` to `base + n_slots - 1`."""

    base: int
    n_slots: int

    @property
    def end(self) -> int:
        return self.base + self.n_slots


def aligned(n_slots: int) -> int:
    """Round a number of slots up to a multiple of ALIGNMENT."""
    return -(-n_slots // ALIGNMENT) * ALIGNMENT


class Arena:
    """Allocates blocks in a range of slots. A block is given back exactly as it was taken."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots // ALIGNMENT * ALIGNMENT
        if self.n_slots < 1:
            raise PoolError(f"a pool needs at least {ALIGNMENT} slots, not {n_slots}")
        self._gaps = [Block(0, self.n_slots)]  # by base; never two that touch
        self._freed = Freed(self.n_slots)
        self._now = STALE
        """The last freeing time given out."""
        self.n_free = self.n_slots
        self._next = 0
        """End of the block taken last, or of the room behind it."""

    def gaps(self) -> tuple[Block, ...]:
        """Free ranges, ascending; no two touch."""
        return tuple(self._gaps)

    def take(self, n_slots: int, room_slots: int = 0) -> Block | None:
        """Take a free block of `n_slots` (rounded up); None: no gap is long enough. Preferred are never-used
        slots, then a block with `room_slots` to grow into, then the block freed longest ago."""
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
        """Possible bases in a gap for a block, each with the latest freeing time of its slots."""
        yield from self._freed.places(gap.base, gap.end, length)
        if gap.base < self._next <= gap.end - length:
            yield self._freed.time(self._next, self._next + length), self._next

    def has_unused(self, n_slots: int) -> bool:
        """True if a block of `n_slots` is free that was never used."""
        return self._freed.has_unused(aligned(n_slots))

    def now(self) -> int:
        """A new freeing time, later than all others, for `give`."""
        self._now += 1
        return self._now

    def give(self, block: Block, time: int | None = None) -> None:
        """Free `block`, and join it with neighbouring gaps. `time`: when its request ended; None: now."""
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
        """Lengthen `block` to `n_slots` at its end; None: the slots there are not free."""
        length = aligned(n_slots) - block.n_slots
        index = bisect_left(self._gaps, Block(block.end, 0))
        if index < len(self._gaps):
            gap = self._gaps[index]
            if gap.base == block.end and gap.n_slots >= length:
                self.claim(Block(block.end, length))  # it goes round from where it was
                return Block(block.base, block.n_slots + length)
        return None

    def move(self, block: Block, n_slots: int, room_slots: int = 0) -> Block | None:
        """A longer block in place of `block`, which it may overlap; None: none fits, and nothing changes."""
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
        """Raise PoolError, with the numbers, unless gaps and `taken` together cover every slot once."""
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
"""Index of a bucket among the bounds; None: the large bucket."""


class Shelves:
    """Free lists of an arena, one for each bucket and block length. Idle blocks all go back to the arena
    whenever it has no room for a block."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._idle: dict[tuple[Bucket, int], deque[tuple[Block, int]]] = {}
        """Idle blocks, each with its freeing time."""
        self._n_idle_slots = 0

    @property
    def n_free(self) -> int:
        return self.arena.n_free + self._n_idle_slots

    def take(self, bucket: Bucket, n_slots: int, room_slots: int = 0) -> Block | None:
        """Take a block of `n_slots` (rounded up): a never-used one, else the block longest in this bucket's
        list, so that keys and values stay readable as long as possible, else as in `Arena.take`."""
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
        """Keep a freed block for the next request of this bucket."""
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
        for idle in self._idle.values():
            yield from (block for block, _ in idle)

    def largest_free(self) -> int:
        """Length of the longest block that can be taken now."""
        longest = run = end = 0
        for block in sorted([*self.arena.gaps(), *self.blocks()]):
            run = run + block.n_slots if block.base == end else block.n_slots
            end = block.end
            longest = max(longest, run)
        return longest
