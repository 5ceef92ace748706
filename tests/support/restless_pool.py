"""A pool whose requests move with every panel that they grow by: copies are what it is there to provoke."""

from __future__ import annotations

from phasewise.serving.batch import KvCopy
from phasewise.serving.pools.contract import (
    ALIGNMENT,
    Demand,
    Grant,
    Move,
    Placement,
    PoolError,
    PoolStats,
    check_demand,
)


class RestlessPool:
    """A KvPool: the lowest gap that is long enough, and a new one at each growth if there is one."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.longest = n_slots
        self.n_moved = 0
        self._held: dict[str, Placement] = {}

    @property
    def states(self) -> None:
        return None

    @property
    def rings(self) -> None:
        return None

    def reserve(self, owner: str, demand: Demand) -> Grant | None:
        check_demand(owner, demand, self._held)
        placement = self._place(owner, demand.held_tokens)
        return None if placement is None else Grant(placement)

    def grow(self, owner: str, n_positions: int) -> Grant | None:
        before = self._held[owner]
        placement = self._place(owner, n_positions)
        if placement is None:  # nowhere else: perhaps over its own slots
            del self._held[owner]
            placement = self._place(owner, n_positions)
        if placement is None:
            self._held[owner] = before
            return None
        self.n_moved += 1
        copy = KvCopy(before.base, placement.base, before.n_slots)
        return Grant(placement, (Move(owner, placement, copy),))

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        del self._held[owner]

    def pin(self, owner: str) -> None:
        """Only growth moves a request here, and what is pinned does not grow."""
        assert owner in self._held

    def unpin(self, owner: str) -> None:
        assert owner in self._held

    def placements(self) -> dict[str, Placement]:
        return dict(self._held)

    def stats(self) -> PoolStats:
        used = sum(placement.n_slots for placement in self._held.values())
        return PoolStats("restless", used, self.n_slots - used, self.n_slots - used, migrations=self.n_moved)

    def check(self) -> None:
        end = 0
        for placement in sorted(self._held.values()):
            if placement.base < end:
                raise PoolError(f"{placement} begins before {end}")
            end = placement.base + placement.n_slots
        if end > self.n_slots:
            raise PoolError(f"{end} is beyond {self.n_slots}")

    def refresh(self) -> bool:
        return False

    def _place(self, owner: str, n_positions: int) -> Placement | None:
        n_slots = -(-n_positions // ALIGNMENT) * ALIGNMENT
        base = 0
        for placement in sorted(self._held.values()):
            if placement.base - base >= n_slots:
                break
            base = placement.base + placement.n_slots
        if base + n_slots > self.n_slots:
            return None
        self._held[owner] = Placement(base, n_slots)
        return self._held[owner]
