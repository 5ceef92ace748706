"""Ring buffers for sliding-window layers: a pool whose requests also get a ring each.

A later position takes the place of one that no token sees any more, so that a request keeps no more than its
window, and what one step writes, in those layers (decision 0047). A ring is given once and stays where it is;
one of a request that cannot become as long is as long as the request can become. All other slots are those of
the pool within, whatever its policy.
"""

from __future__ import annotations

from phasewise.serving.pools.arena import Arena, Block, aligned
from phasewise.serving.pools.contract import Demand, Grant, KvPool, Placement, Rings
from phasewise.serving.pools.wrapped import WrappedPool


class RingedPool(WrappedPool):
    """A KvPool over another one, whose placements have rings."""

    def __init__(self, pool: KvPool, rings: Rings) -> None:
        super().__init__(pool)
        self._rings = rings
        self._arena = Arena(rings.n_slots)
        self._blocks: dict[str, Block] = {}

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
