"""Free slots by the time at which they were given back: what lies there can be taken over until they are
written again, so that those that nobody ever had go first, and then what is oldest (decision 0136)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

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
