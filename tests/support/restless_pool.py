"""A pool whose requests move with every panel that they grow by: copies are what it is there to provoke."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.serving.batch import KvCopy
from phasewise.serving.pools.contract import (
    ALIGNMENT,
    Demand,
    Grant,
    Move,
    Placement,
    PoolError,
    PoolStats,
)
from phasewise.serving.pools.pool import BlockPool, SlotHolding


@dataclass(slots=True, kw_only=True)
class _Placed(SlotHolding):
    placement: Placement


class RestlessPool(BlockPool[_Placed]):
    """The lowest gap that is long enough, and a new one at each growth if there is one."""

    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.n_moved = 0

    def _reserve(self, owner: str, demand: Demand) -> Grant | None:
        placement = self._place(demand.held_tokens)
        if placement is None:
            return None
        self._held[owner] = _Placed(demand, placement=placement)
        return Grant(placement)

    def _grow(self, owner: str, held: _Placed, n_positions: int) -> Grant | None:
        before, placement = held.placement, self._place(n_positions)
        if placement is None:  # nowhere else: perhaps over its own slots
            del self._held[owner]
            placement = self._place(n_positions)
            self._held[owner] = held
        if placement is None:
            return None
        held.placement = placement
        self.n_moved += 1
        copy = KvCopy(before.base, placement.base, before.n_slots)
        return Grant(placement, (Move(owner, placement, copy),))

    def _release(self, held: _Placed, answer_tokens: int | None) -> None:
        """Learn nothing."""

    def _placement(self, held: _Placed) -> Placement:
        return held.placement

    def stats(self) -> PoolStats:
        used = sum(held.placement.n_slots for held in self._held.values())
        return PoolStats("restless", used, self.n_slots - used, self.n_slots - used, migrations=self.n_moved)

    def _in_order(self) -> list[Placement]:
        return sorted(held.placement for held in self._held.values())

    def _check(self) -> None:
        end = 0
        for placement in self._in_order():
            if placement.base < end:
                raise PoolError(f"{placement} begins before {end}")
            end = placement.base + placement.n_slots
        if end > self.n_slots:
            raise PoolError(f"{end} is beyond {self.n_slots}")

    def _place(self, n_positions: int) -> Placement | None:
        n_slots = -(-n_positions // ALIGNMENT) * ALIGNMENT
        base = 0
        for placement in self._in_order():
            if placement.base - base >= n_slots:
                break
            base = placement.base + placement.n_slots
        return None if base + n_slots > self.n_slots else Placement(base, n_slots)
