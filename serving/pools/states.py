"""A pool whose placements have a place for a state each (`state_places`)."""

from __future__ import annotations

from phasewise.serving.pools.contract import Demand, Grant, KvPool, Placement, Rings
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.pools.wrapped import WrappedPool


class StatefulPool(WrappedPool):
    """A KvPool over another one, whose placements have a place for a state."""

    def __init__(self, pool: KvPool, places: StatePlaces) -> None:
        super().__init__(pool)
        self._places = places

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
        return self._dressed_grant(owner, grant)

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        self._pool.release(owner, answer_tokens)
        self._places.return_of(owner)

    def check(self) -> None:
        self._pool.check()
        self._places.check()

    def _dressed(self, owner: str, placement: Placement) -> Placement:
        return placement._replace(state=self._places.place_of(owner))
