"""A pool over another one, whose placements have something beside slots: `rings`, `states`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from phasewise.serving.pools.contract import Grant, KvPool, Move, Placement, PoolStats


class WrappedPool(ABC):
    """A KvPool that passes calls on to an inner pool and adds rings or states to its placements."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    @abstractmethod
    def _dressed(self, owner: str, placement: Placement) -> Placement:
        """A placement of the inner pool with the owner's ring or state added."""

    @property
    def n_slots(self) -> int:
        return self._pool.n_slots

    @property
    def longest(self) -> int:
        return self._pool.longest

    def grow(self, owner: str, n_positions: int) -> Grant | None:
        grant = self._pool.grow(owner, n_positions)
        return None if grant is None else self._dressed_grant(owner, grant)

    def pin(self, owner: str) -> None:
        self._pool.pin(owner)

    def unpin(self, owner: str) -> None:
        self._pool.unpin(owner)

    def placements(self) -> dict[str, Placement]:
        return {
            owner: self._dressed(owner, placement) for owner, placement in self._pool.placements().items()
        }

    def stats(self) -> PoolStats:
        return self._pool.stats()

    def refresh(self) -> bool:
        return self._pool.refresh()

    def _dressed_grant(self, owner: str, grant: Grant) -> Grant:
        moves = tuple(
            Move(move.owner, self._dressed(move.owner, move.placement), move.copy) for move in grant.moves
        )
        return Grant(self._dressed(owner, grant.placement), moves)
