"""A pool of contiguous blocks. How long a block is, and the next one when it is full, its `Sizes` say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from phasewise.serving.batch import KvCopy
from phasewise.serving.pools.arena import Arena, Block
from phasewise.serving.pools.contract import (
    BucketStats,
    Demand,
    Growth,
    Placement,
    PoolError,
    PoolStats,
    check_demand,
)
from phasewise.serving.pools.shelves import Bucket, Shelves


class Size(NamedTuple):
    """Of a block: how many positions are wanted, and the bucket that it belongs to."""

    n_positions: int
    bucket: Bucket


class Sizes(Protocol):
    """What one policy of contiguous blocks does differently from another."""

    @property
    def policy(self) -> str: ...

    @property
    def bounds(self) -> tuple[int, ...]:
        """Of the buckets that new requests get, ascending; another object whenever they have changed."""

    @property
    def large_bound(self) -> int:
        """Of the large bucket."""

    def first(self, demand: Demand) -> Size:
        """Of a request that begins."""

    def next(self, demand: Demand, n_positions: int) -> Size:
        """Of one that has outgrown its block and needs so many now."""

    def ended(self, demand: Demand, answer_tokens: int) -> None:
        """A request ended by itself."""

    def refresh(self) -> bool:
        """As KvPool.refresh."""

    def counts(self) -> dict[str, Any]:
        """Fields of PoolStats that these sizes count."""


@dataclass(slots=True)
class _Holding:
    block: Block
    bucket: Bucket
    bounds: tuple[int, ...]
    """Of the buckets when the block was taken."""
    demand: Demand
    outgrown: bool = False


class ContiguousPool:
    """A KvPool whose placements are one run each."""

    def __init__(self, n_slots: int, sizes: Sizes) -> None:
        self._arena = Arena(n_slots)
        self._shelves = Shelves(self._arena)
        self._sizes = sizes
        self._bounds = sizes.bounds
        self._held: dict[str, _Holding] = {}
        self._ended: Counter[Bucket] = Counter()
        self._wasted: Counter[Bucket] = Counter()
        self._migrations = self._overflows = 0

    @property
    def n_slots(self) -> int:
        return self._arena.n_slots

    @property
    def longest(self) -> int:
        return self._arena.n_slots

    def reserve(self, owner: str, demand: Demand) -> Placement | None:
        check_demand(owner, demand, self._held)
        self._follow_bounds()
        size = self._sizes.first(demand)
        block = self._shelves.take(size.bucket, self._possible(size, demand.held_tokens))
        if block is None:
            return None
        self._held[owner] = _Holding(block, size.bucket, self._bounds, demand)
        return Placement(block.base, block.n_slots)

    def grow(self, owner: str, n_positions: int) -> Growth | None:
        held = self._holding(owner)
        if n_positions > held.demand.most_tokens:
            raise PoolError(f"{owner!r} asks for {n_positions} positions, more than its {held.demand}")
        before = held.block
        if n_positions > before.n_slots and not self._enlarge(held, n_positions):
            return None
        copy = None
        if held.block.base != before.base:
            self._migrations += 1
            copy = KvCopy(before.base, held.block.base, before.n_slots)
        return Growth(Placement(held.block.base, held.block.n_slots), copy)

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        held = self._holding(owner)
        del self._held[owner]
        self._follow_bounds()
        if held.bounds is self._bounds and held.bucket is not None:
            self._shelves.keep(held.bucket, held.block)
        else:
            self._arena.give(held.block)
        if answer_tokens is not None:
            self._sizes.ended(held.demand, answer_tokens)
            self._ended[held.bucket] += held.block.n_slots
            self._wasted[held.bucket] += held.block.n_slots - held.demand.prompt_tokens - answer_tokens

    def placements(self) -> dict[str, Placement]:
        return {owner: Placement(held.block.base, held.block.n_slots) for owner, held in self._held.items()}

    def refresh(self) -> bool:
        return self._sizes.refresh()

    def stats(self) -> PoolStats:
        return PoolStats(
            policy=self._sizes.policy,
            slots_used=self.n_slots - self._shelves.n_free,
            slots_free=self._shelves.n_free,
            largest_reservable=self._shelves.largest_free(),
            buckets=tuple(self._bucket_stats()),
            migrations=self._migrations,
            overflows=self._overflows,
            **self._sizes.counts(),
        )

    def check(self) -> None:
        used = [held.block for held in self._held.values()]
        self._arena.check([*used, *self._shelves.blocks()])
        n_used = sum(block.n_slots for block in used)
        if n_used + self._shelves.n_free != self.n_slots:
            raise PoolError(f"{self._shelves.n_free} free + {n_used} used slots are not {self.n_slots}")

    def _enlarge(self, held: _Holding, n_positions: int) -> bool:
        """In place if the slots behind are free, else by moving; as long as wanted, else the shortest."""
        size = self._sizes.next(held.demand, n_positions)
        wanted = self._possible(size, n_positions)
        for clear in (False, True):
            if clear:
                self._shelves.clear()
            for length in (wanted, n_positions) if clear else (wanted,):
                block = self._arena.extend(held.block, length) or self._arena.move(held.block, length)
                if block is not None:
                    self._overflows += not held.outgrown
                    held.block, held.bucket, held.outgrown = block, size.bucket, True
                    return True
        return False

    def _possible(self, size: Size, at_least: int) -> int:
        return max(at_least, min(size.n_positions, self.n_slots))

    def _follow_bounds(self) -> None:
        """Blocks that wait for buckets of old bounds go back to the arena."""
        if self._bounds is not self._sizes.bounds:
            self._bounds = self._sizes.bounds
            self._shelves.clear()

    def _holding(self, owner: str) -> _Holding:
        try:
            return self._held[owner]
        except KeyError:
            raise PoolError(f"{owner!r} holds no slots") from None

    def _bucket_stats(self) -> list[BucketStats]:
        bounds = self._sizes.bounds
        blocks: Counter[Bucket] = Counter()
        slots: Counter[Bucket] = Counter()
        for held in self._held.values():
            bucket = held.bucket if held.bucket is None or held.bucket < len(bounds) else None
            blocks[bucket] += 1
            slots[bucket] += held.block.n_slots
        named: list[tuple[str, Bucket, int]] = [(str(at + 1), at, bound) for at, bound in enumerate(bounds)]
        named.append(("large", None, self._sizes.large_bound))
        return [
            BucketStats(
                name,
                bound,
                blocks[bucket],
                self._shelves.n_idle(bucket),
                slots[bucket],
                self._ended[bucket],
                self._wasted[bucket],
            )
            for name, bucket, bound in named
        ]
