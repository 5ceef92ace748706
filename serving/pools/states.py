"""A pool whose placements have a place for a state each (`state_places`)."""

from __future__ import annotations

from phasewise.serving.pools.contract import Demand, Grant, KvPool, Move, Placement, PoolStats, Rings
from phasewise.serving.pools.state_places import StatePlaces


class StatefulPool:
    """A KvPool over another one, whose placements have a place for a state."""

    def __init__(self, pool: KvPool, places: StatePlaces) -> None:
        self._pool = pool
        self._places = places

    @property
    def n_slots(self) -> int:
        return self._pool.n_slots

    @property
    def longest(self) -> int:
        return self._pool.longest

    @property
    def rings(self) -> Rings | None:
        return self._pool.rings

    @property
    def states(self) -> StatePlaces:
        """All places."""
        return self._places

    def reserve(self, owner: str, demand: Demand) -> Grant | None:
        if not self._places.n_spare:
            return None
        grant = self._pool.reserve(owner, demand)
        if grant is None:
            return None
        self._places.give(owner)
        return self._with_states(owner, grant)

    def grow(self, owner: str, n_positions: int) -> Grant | None:
        grant = self._pool.grow(owner, n_positions)
        return None if grant is None else self._with_states(owner, grant)

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        self._pool.release(owner, answer_tokens)
        self._places.return_of(owner)

    def pin(self, owner: str) -> None:
        self._pool.pin(owner)

    def unpin(self, owner: str) -> None:
        self._pool.unpin(owner)

    def placements(self) -> dict[str, Placement]:
        return {owner: self._with_state(owner, placed) for owner, placed in self._pool.placements().items()}

    def stats(self) -> PoolStats:
        return self._pool.stats()

    def check(self) -> None:
        self._pool.check()
        self._places.check()

    def refresh(self) -> bool:
        return self._pool.refresh()

    def _with_states(self, owner: str, grant: Grant) -> Grant:
        moves = tuple(
            Move(move.owner, self._with_state(move.owner, move.placement), move.copy) for move in grant.moves
        )
        return Grant(self._with_state(owner, grant.placement), moves)

    def _with_state(self, owner: str, placement: Placement) -> Placement:
        return placement._replace(state=self._places.place_of(owner))
