"""Ring buffers for sliding-window layers: a pool whose requests also get a ring each.

A later position takes the place of one that no token sees any more, so that a request keeps no more than its
window, and what one step writes, in those layers (decision 0047). A ring is given once and stays where it is;
one of a request that cannot become as long is as long as the request can become. All other slots are those of
the pool within, whatever its policy.
"""

from __future__ import annotations

from phasewise.serving.pools.arena import Arena, Block, aligned
from phasewise.serving.pools.contract import Demand, Grant, KvPool, Move, Placement, PoolStats, Rings


class RingedPool:
    """A KvPool over another one, whose placements have rings."""

    def __init__(self, pool: KvPool, rings: Rings) -> None:
        self._pool = pool
        self._rings = rings
        self._arena = Arena(rings.n_slots)
        self._blocks: dict[str, Block] = {}

    @property
    def n_slots(self) -> int:
        return self._pool.n_slots

    @property
    def longest(self) -> int:
        return self._pool.longest

    @property
    def rings(self) -> Rings:
        """All rings."""
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
        return self._ringed_grant(owner, grant)

    def grow(self, owner: str, n_positions: int) -> Grant | None:
        grant = self._pool.grow(owner, n_positions)
        return None if grant is None else self._ringed_grant(owner, grant)

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        self._pool.release(owner, answer_tokens)
        self._arena.give(self._blocks.pop(owner))

    def pin(self, owner: str) -> None:
        self._pool.pin(owner)

    def unpin(self, owner: str) -> None:
        self._pool.unpin(owner)

    def placements(self) -> dict[str, Placement]:
        return {owner: self._ringed(owner, placement) for owner, placement in self._pool.placements().items()}

    def stats(self) -> PoolStats:
        return self._pool.stats()

    def check(self) -> None:
        self._pool.check()
        self._arena.check(self._blocks.values())

    def refresh(self) -> bool:
        return self._pool.refresh()

    def _ringed_grant(self, owner: str, grant: Grant) -> Grant:
        moves = tuple(
            Move(move.owner, self._ringed(move.owner, move.placement), move.copy) for move in grant.moves
        )
        return Grant(self._ringed(owner, grant.placement), moves)

    def _ringed(self, owner: str, placement: Placement) -> Placement:
        block = self._blocks[owner]
        return placement._replace(ring=(self._rings.first_slot + block.base, block.n_slots))
