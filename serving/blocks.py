"""KV slots: one contiguous range per request, first fit, neighbours joined again on release.

Integers only. The conservation law (free + used = all, no slot with two owners) is `BlockPool.check`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


class BlockPoolError(AssertionError):
    """The pool was misused or has lost count: a bug in its caller, never a user's mistake."""


@dataclass(frozen=True, slots=True, order=True)
class SlotRange:
    """Slots base .. base + length - 1."""

    base: int
    length: int

    @property
    def end(self) -> int:
        return self.base + self.length


class BlockPool:
    """`n_slots` KV slots, handed out as contiguous ranges to named owners."""

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise BlockPoolError(f"a pool needs at least one slot, not {n_slots}")
        self.n_slots = n_slots
        self._free: list[SlotRange] = [SlotRange(0, n_slots)]  # by base; never two that touch
        self._owned: dict[str, SlotRange] = {}

    @property
    def n_used(self) -> int:
        return sum(block.length for block in self._owned.values())

    @property
    def n_free(self) -> int:
        return sum(gap.length for gap in self._free)

    @property
    def largest_free(self) -> int:
        """The longest range that could be reserved now."""
        return max((gap.length for gap in self._free), default=0)

    def owners(self) -> dict[str, SlotRange]:
        """Who holds what, as a copy."""
        return dict(self._owned)

    def reserve(self, owner: str, n_slots: int) -> SlotRange | None:
        """The lowest range that is long enough, or None while no gap is. One range per owner."""
        if n_slots < 1 or owner in self._owned:
            raise BlockPoolError(
                f"cannot reserve {n_slots} slots for {owner!r}: it holds {self._owned.get(owner)}"
            )
        for index, gap in enumerate(self._free):
            if gap.length >= n_slots:
                self._take(index, n_slots)
                self._owned[owner] = SlotRange(gap.base, n_slots)
                return self._owned[owner]
        return None

    def release(self, owner: str) -> None:
        """Give back all that `owner` holds, and join it with the gaps on either side."""
        block = self._owned.pop(owner, None)
        if block is None:
            raise BlockPoolError(f"{owner!r} holds no slots and cannot release them")
        index = bisect_left(self._free, block)
        base, end = block.base, block.end
        if index < len(self._free) and self._free[index].base == end:
            end = self._free.pop(index).end
        if index > 0 and self._free[index - 1].end == base:
            base = self._free.pop(index - 1).base
            index -= 1
        self._free.insert(index, SlotRange(base, end - base))

    def check(self) -> None:
        """Raise, with the numbers, unless every slot is either free or has exactly one owner."""
        free, used = self.n_free, self.n_used
        if free + used != self.n_slots:
            raise BlockPoolError(f"{free} free + {used} used slots are not {self.n_slots}")
        position = 0
        for block in sorted([*self._free, *self._owned.values()]):
            if block.base != position:
                raise BlockPoolError(
                    f"slots from {min(position, block.base)}: expected {position}, found {block}"
                )
            position = block.end
        for left, right in zip(self._free, self._free[1:], strict=False):
            if left.end >= right.base:
                raise BlockPoolError(f"gaps {left} and {right} are not joined")

    def _take(self, index: int, n_slots: int) -> None:
        gap = self._free[index]
        if gap.length == n_slots:
            del self._free[index]
        else:
            self._free[index] = SlotRange(gap.base + n_slots, gap.length - n_slots)
