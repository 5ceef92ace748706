"""Free lists of blocks over one arena: a block that a bucket gave back waits there for its next request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from phasewise.serving.pools.arena import Arena, Block, aligned

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
