"""Pools around another pool that add a ring, or a place for a state, to its placements."""

from __future__ import annotations

from abc import ABC, abstractmethod

from phasewise.serving.pools.arena import Arena, Block, aligned
from phasewise.serving.pools.contract import Demand, Grant, KvPool, Move, Placement, PoolStats, Rings
from phasewise.serving.pools.state_places import StatePlaces


class WrappedPool(ABC):
    """A KvPool that passes calls on to an inner pool and adds rings or states to its placements."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    @abstractmethod
    def _dressed(self, owner: str, placement: Placement) -> Placement:
        """The inner pool's placement with the owner's ring or state added."""

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


class RingedPool(WrappedPool):
    """A KvPool around another one that adds rings for sliding-window layers. A later position overwrites one
    that no token sees any more, so that a request keeps only its window and what one step writes (decision
    0047). A ring never moves; for a shorter request it is as long as the request can become."""

    def __init__(self, pool: KvPool, rings: Rings) -> None:
        super().__init__(pool)
        self._rings = rings
        self._arena = Arena(rings.n_slots)
        self._blocks: dict[str, Block] = {}

    @property
    def rings(self) -> Rings:
        return self._rings

    @property
    def states(self) -> None:
        return None

    def reserve(self, owner: str, demand: Demand) -> Grant | None:
        block = self._arena.take(min(aligned(demand.most_tokens), self._rings.longest))
        if block is None:
            return None
        grant = self._pool.reserve(owner, demand)
        if grant is None:
            self._arena.give(block)
            return None
        self._blocks[owner] = block
        return self._dressed_grant(owner, grant)

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        self._pool.release(owner, answer_tokens)
        self._arena.give(self._blocks.pop(owner))

    def check(self) -> None:
        self._pool.check()
        self._arena.check(self._blocks.values())

    def _dressed(self, owner: str, placement: Placement) -> Placement:
        block = self._blocks[owner]
        return placement._replace(ring=(self._rings.first_slot + block.base, block.n_slots))


class StatefulPool(WrappedPool):
    """A KvPool around another one that adds a place for a state to each placement."""

    def __init__(self, pool: KvPool, places: StatePlaces) -> None:
        super().__init__(pool)
        self._places = places

    @property
    def rings(self) -> Rings | None:
        return self._pool.rings

    @property
    def states(self) -> StatePlaces:
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
