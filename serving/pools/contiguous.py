"""A pool of contiguous blocks, whose lengths its `Sizes` decide. Blocks may be shorter than their requests
will need: a request is admitted only if the most slots that all would hold at any one time, each growing to
its expected end, fit beside the reserve (`peak`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from phasewise.serving.batch import KvCopy
from phasewise.serving.pools.arena import STALE, Arena, Block, Bucket, Shelves, aligned
from phasewise.serving.pools.contract import (
    BucketStats,
    Demand,
    Grant,
    Move,
    Placement,
    PoolError,
    PoolStats,
)
from phasewise.serving.pools.pool import BlockPool, SlotHolding


class Shift(NamedTuple):
    """Copy of a block's slots to `target`, which may overlap the source."""

    source: Block
    target: int


def opened(blocks: Sequence[Block], n_slots: int, needed: int) -> tuple[list[Shift], int] | None:
    """The cheapest shifts, in order, after which `needed` slots are free in one run, and the run's base.
    `blocks`: all held blocks, ascending. None: too few slots are free."""
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
    """The cheapest shifts, in order, after which `needed` slots are free behind the block of index `growing`,
    which may be shifted too. None: too few slots are free."""
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
    """Running sums of the blocks' slots, starting with 0."""
    return [0, *accumulate(block.n_slots for block in blocks)]


def _packed(blocks: Sequence[Block], end: int) -> tuple[list[Shift], int]:
    """Shifts that pack the blocks as low as possible above `end`, and the end of the last block."""
    shifts = []
    for block in blocks:
        if block.base != end:
            shifts.append(Shift(block, end))
        end += block.n_slots
    return shifts, end


class Size(NamedTuple):
    """Size of a block, and the positions that its request is expected to need in the end."""

    n_positions: int
    end_positions: int
    bucket: Bucket
    """Bucket that the request belongs to."""


class Sizes(ABC):
    """Block sizes of a policy of contiguous blocks."""

    policy: str
    bounds: tuple[int, ...] = ()
    """Bounds of the buckets for new requests, ascending; a new object whenever they change."""
    large_bound: int
    """Longest answer expected in the large bucket."""
    reserve_share = 0.0
    """Share of all slots that is never promised to requests."""
    squeezes = False
    """True if requests are moved to join free slots that lie apart."""

    @abstractmethod
    def first(self, demand: Demand) -> Size:
        """Size of the block for a request that begins, or begins again."""

    @abstractmethod
    def next(self, demand: Demand, n_positions: int) -> Size:
        """Size of the next block for a request whose block is full and that needs `n_positions`."""

    def ended(self, demand: Demand, answer_tokens: int) -> None:  # noqa: B027 - most learn nothing
        """Learn from a request that ended by itself."""

    def refresh(self) -> bool:
        """Learn from ended requests, like `KvPool.refresh`."""
        return False

    def counts(self) -> dict[str, Any]:
        """The fields of PoolStats that depend on the sizes."""
        return {}


@dataclass(slots=True, kw_only=True)
class _Holding(SlotHolding):
    block: Block
    size: Size
    bounds: tuple[int, ...]
    """The buckets' bounds when the block was taken."""


class ContiguousPool(BlockPool[_Holding]):
    """A KvPool whose placements are one contiguous block each."""

    def __init__(self, n_slots: int, sizes: Sizes) -> None:
        self._arena = Arena(n_slots)
        super().__init__(self._arena.n_slots)
        self._shelves = Shelves(self._arena)
        self._sizes = sizes
        self._bounds = sizes.bounds
        self._is_pressed = False  # a growth found no room, and no request has ended since
        self._slots_ended: Counter[Bucket] = Counter()
        self._slots_wasted: Counter[Bucket] = Counter()
        self._migrations = self._overflows = self._to_large = 0

    def _reserve(self, owner: str, demand: Demand) -> Grant | None:
        self._follow_bounds()
        size = self._sizes.first(demand)
        n_positions = self._possible(size, demand.held_tokens)
        if self._held and (self._is_pressed or not self._is_room_for(size, n_positions, demand.most_tokens)):
            return None
        moves: tuple[Move, ...] = ()
        block = self._shelves.take(size.bucket, n_positions, self._room(demand))
        if block is None and self._sizes.squeezes:
            moves, block = self._opened(n_positions)
        if block is None:
            return None
        self._held[owner] = _Holding(demand, block=block, size=size, bounds=self._bounds)
        self._to_large += bool(self._bounds) and size.bucket is None
        return Grant(Placement(*block), moves)

    def _grow(self, owner: str, held: _Holding, n_positions: int) -> Grant | None:
        moves: tuple[Move, ...] | None = ()
        if n_positions > held.block.n_slots:
            moves = self._enlarge(owner, held, n_positions)
            self._is_pressed = self._is_pressed or moves is None
        return None if moves is None else Grant(Placement(*held.block), moves)

    def _release(self, held: _Holding, answer_tokens: int | None) -> None:
        self._follow_bounds()
        if held.bounds is self._bounds and held.size.bucket is not None:
            self._shelves.keep(held.size.bucket, held.block)
        else:
            self._arena.give(held.block)
        if answer_tokens is None:
            return
        self._is_pressed = False
        self._sizes.ended(held.demand, answer_tokens)
        self._slots_ended[held.size.bucket] += held.block.n_slots
        filled = held.demand.prompt_tokens + answer_tokens
        self._slots_wasted[held.size.bucket] += max(0, held.block.n_slots - filled)

    def _placement(self, held: _Holding) -> Placement:
        return Placement(*held.block)

    def refresh(self) -> bool:
        return self._sizes.refresh()

    def stats(self) -> PoolStats:
        return PoolStats(
            policy=self._sizes.policy,
            slots_used=self.n_slots - self._shelves.n_free,
            slots_free=self._shelves.n_free,
            largest_reservable=self._shelves.largest_free(),
            buckets=self._bucket_stats(),
            migrations=self._migrations,
            overflows=self._overflows,
            to_large=self._to_large,
            **self._sizes.counts(),
        )

    def _check(self) -> None:
        used = [held.block for held in self._held.values()]
        self._arena.check([*used, *self._shelves.blocks()])
        n_used = sum(block.n_slots for block in used)
        if n_used + self._shelves.n_free != self.n_slots:
            raise PoolError(f"{self._shelves.n_free} free + {n_used} used slots are not {self.n_slots}")

    def _is_room_for(self, size: Size, n_positions: int, most_tokens: int) -> bool:
        to_come = [(size.end_positions - n_positions, n_positions)]
        at_most = most_tokens - n_positions  # to come, at their longest possible ends
        for held in self._held.values():
            n_slots = held.block.n_slots
            to_come.append((max(0, held.size.end_positions - n_slots), n_slots))
            at_most += max(0, held.demand.most_tokens - n_slots)
        promised = peak(to_come)
        return promised <= self.n_slots - min(self.n_slots * self._sizes.reserve_share, max(0, at_most))

    def _enlarge(self, owner: str, held: _Holding, n_positions: int) -> tuple[Move, ...] | None:
        """Lengthen a block in place if the slots behind it are free, else move it; to the policy's size, else
        just to `n_positions`. None: there is no room."""
        size = self._sizes.next(held.demand, n_positions)
        moves = self._longer(owner, held, self._possible(size, n_positions))
        if moves is None:
            self._shelves.clear()
            for wanted in (self._possible(size, n_positions), n_positions):
                moves = self._longer(owner, held, wanted)
                if moves is None and self._sizes.squeezes:
                    moves = self._squeezed(owner, held, wanted)
                if moves is not None:
                    break
        if moves is None:
            return None
        if size.bucket is None and held.size.bucket is not None:
            self._overflows += 1
        held.size, held.bounds = size, self._sizes.bounds
        return moves

    def _longer(self, owner: str, held: _Holding, n_positions: int) -> tuple[Move, ...] | None:
        """Lengthen or move a block into free slots, without moving others; None: there is no room."""
        before = held.block
        block = self._arena.extend(before, n_positions)
        if block is None:
            block = self._arena.move(before, n_positions, self._room(held.demand))
        if block is None:
            return None
        held.block = block
        if block.base == before.base:
            return ()
        self._migrations += 1
        return (Move(owner, Placement(*block), KvCopy(before.base, block.base, before.n_slots)),)

    def _squeezed(self, owner: str, held: _Holding, n_positions: int) -> tuple[Move, ...] | None:
        """Move other blocks together until the block can be lengthened; None: impossible."""
        owners, blocks = self._in_order()
        needed = aligned(n_positions) - held.block.n_slots
        shifts = enlarged(blocks, self.n_slots, owners.index(owner), needed)
        if shifts is None or self._moves_pinned(dict(zip(blocks, owners, strict=True)), shifts):
            return None
        moves = self._shifted(dict(zip(blocks, owners, strict=True)), shifts)
        block = self._arena.extend(held.block, n_positions)
        assert block is not None, f"no room behind {held} after {shifts}"
        held.block = block
        return tuple(
            move._replace(placement=Placement(*block)) if move.owner == owner else move for move in moves
        )

    def _opened(self, n_positions: int) -> tuple[tuple[Move, ...], Block | None]:
        """Move other blocks together until a new block fits; (), None: impossible."""
        owners, blocks = self._in_order()
        gap = opened(blocks, self.n_slots, aligned(n_positions))
        if gap is None:
            return (), None
        shifts, base = gap
        by_block = dict(zip(blocks, owners, strict=True))
        if self._moves_pinned(by_block, shifts):
            return (), None
        moves = self._shifted(by_block, shifts)
        block = Block(base, aligned(n_positions))
        self._arena.claim(block)
        return moves, block

    def _in_order(self) -> tuple[list[str], list[Block]]:
        """Owners and their blocks, in slot order."""
        held = sorted((holding.block, owner) for owner, holding in self._held.items())
        return [owner for _, owner in held], [block for block, _ in held]

    def _moves_pinned(self, owners: Mapping[Block, str], shifts: Sequence[Shift]) -> bool:
        return any(self._held[owners[shift.source]].is_pinned for shift in shifts)

    def _shifted(self, owners: Mapping[Block, str], shifts: Sequence[Shift]) -> tuple[Move, ...]:
        for shift in shifts:
            self._arena.give(shift.source, STALE)
        moves = []
        for source, target in shifts:
            owner, block = owners[source], Block(target, source.n_slots)
            self._arena.claim(block)
            self._held[owner].block = block
            moves.append(Move(owner, Placement(*block), KvCopy(source.base, target, source.n_slots)))
        self._migrations += len(moves)
        return tuple(moves)

    def _room(self, demand: Demand) -> int:
        """Slots to leave behind a block for growth up to the longest recent answer: a block that moves
        overwrites slots that others could reuse. 0: blocks of this policy do not grow step by step."""
        longest = min(demand.most_tokens, demand.prompt_tokens + self._sizes.large_bound)
        return longest if self._sizes.squeezes else 0

    def _possible(self, size: Size, at_least: int) -> int:
        return max(at_least, min(size.n_positions, self.n_slots))

    def _follow_bounds(self) -> None:
        """Return idle blocks to the arena when the bounds have changed."""
        if self._bounds is not self._sizes.bounds:
            self._bounds = self._sizes.bounds
            self._shelves.clear()

    def _bucket_stats(self) -> tuple[BucketStats, ...]:
        blocks: Counter[Bucket] = Counter()
        slots: Counter[Bucket] = Counter()
        for held in self._held.values():
            blocks[held.size.bucket] += 1
            slots[held.size.bucket] += held.block.n_slots
        stats = []
        for level, bound in enumerate([*self._sizes.bounds, self._sizes.large_bound]):
            is_large = level == len(self._sizes.bounds)
            bucket, name = (None, "large") if is_large else (level, str(level + 1))
            ended = self._slots_ended[bucket], self._slots_wasted[bucket]
            stats.append(BucketStats(name, bound, blocks[bucket], slots[bucket], *ended))
        return tuple(stats)


def peak(requests: Iterable[tuple[int, int]]) -> int:
    """Most slots held at any one time by requests of (slots to come, slots held) that grow at one pace, and
    give back all at their end. Just before a request ends, those with more to come have grown as much as it
    has."""
    most = held = 0
    for count, (to_come, slots) in enumerate(sorted(requests, reverse=True), 1):
        held += slots
        most = max(most, held + max(0, to_come) * count)
    return most
