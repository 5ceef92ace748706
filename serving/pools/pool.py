"""Every KV pool: requests hold blocks of slots, and beside them, where layers need it, a ring and a place for
a state. A policy decides blocks alone (`contiguous`, `opening`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from phasewise._words import counted
from phasewise.serving.pools.arena import Arena, Block, aligned
from phasewise.serving.pools.contract import Demand, Grant, Placement, PoolError, PoolStats, Rings
from phasewise.serving.pools.state_places import StatePlaces


@dataclass(slots=True)
class SlotHolding:
    """A request that holds slots."""

    demand: Demand
    is_pinned: bool = False


Held = TypeVar("Held", bound=SlotHolding)


class Beside:
    """Rings and places for states of a pool's requests. A later position of a ring overwrites one that no
    token sees any more, so that a request keeps only its window and what one step writes (decision 0047). A
    ring never moves; for a shorter request it is as long as the request can become."""

    def __init__(self, rings: Rings | None, states: StatePlaces | None) -> None:
        self._rings, self._states = rings, states
        self._arena = None if rings is None else Arena(rings.n_slots)
        self._blocks: dict[str, Block] = {}

    def take(self, owner: str, demand: Demand) -> bool:
        """Take a request's ring and its place. False: there is no room, and nothing is taken."""
        if self._states is not None and not self._states.n_spare:
            return False
        if self._arena is not None and self._rings is not None:
            block = self._arena.take(min(aligned(demand.most_tokens), self._rings.longest))
            if block is None:
                return False
            self._blocks[owner] = block
        if self._states is not None:
            self._states.give(owner)
        return True

    def give_back(self, owner: str) -> None:
        if self._arena is not None:
            self._arena.give(self._blocks.pop(owner))
        if self._states is not None:
            self._states.return_of(owner)

    def dressed(self, owner: str, placement: Placement) -> Placement:
        """A placement with the owner's ring and place."""
        if self._rings is not None:
            block = self._blocks[owner]
            placement = placement._replace(ring=(self._rings.first_slot + block.base, block.n_slots))
        if self._states is not None:
            placement = placement._replace(state=self._states.place_of(owner))
        return placement

    def check(self) -> None:
        if self._arena is not None:
            self._arena.check(self._blocks.values())
        if self._states is not None:
            self._states.check()


class BlockPool(ABC, Generic[Held]):
    """`n_slots` KV slots under one policy. All calls but `refresh` are on one thread."""

    rings: Rings | None = None
    """Rings of the placements; None: there are none."""
    states: StatePlaces | None = None
    """State places of the placements; None: there are none."""
    _beside: Beside | None = None

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._held: dict[str, Held] = {}

    def beside(self, rings: Rings | None = None, states: StatePlaces | None = None) -> BlockPool[Held]:
        """This empty pool, whose placements have rings and places for states from now on."""
        self.rings, self.states = rings, states
        self._beside = Beside(rings, states) if rings or states else None
        return self

    def reserve(self, owner: str, demand: Demand) -> Grant | None:
        """Give a new owner room for at least `demand.held_tokens`; None: there is no room now."""
        if owner in self._held:
            raise PoolError(f"{owner!r} holds slots already")
        if not 1 <= demand.held_tokens <= demand.most_tokens or demand.prompt_tokens > demand.held_tokens:
            raise PoolError(f"no request of {owner!r} can need {demand}")
        if self._beside is None:
            return self._reserve(owner, demand)
        if not self._beside.take(owner, demand):
            return None
        grant = self._reserve(owner, demand)
        if grant is None:
            self._beside.give_back(owner)
            return None
        return self._dressed(owner, grant)

    def grow(self, owner: str, n_positions: int) -> Grant | None:
        """Give `owner` room for `n_positions` (at most the demand's `most_tokens`); None: no room now."""
        held = self._holding(owner)
        if n_positions > held.demand.most_tokens or held.is_pinned:
            pinned = " while it is pinned" if held.is_pinned else ""
            raise PoolError(f"{owner!r} of {held.demand} asks for {counted(n_positions, 'position')}{pinned}")
        grant = self._grow(owner, held, n_positions)
        return grant if grant is None or self._beside is None else self._dressed(owner, grant)

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        """Free all slots of `owner`. `answer_tokens`: to learn from; None: it did not end by itself."""
        held = self._holding(owner)
        del self._held[owner]
        self._release(held, answer_tokens)
        if self._beside is not None:
            self._beside.give_back(owner)

    def pin(self, owner: str) -> None:
        """Keep the block of `owner` in place until `unpin` or `release`; it must not grow meanwhile."""
        self._holding(owner).is_pinned = True

    def unpin(self, owner: str) -> None:
        """Allow the block of `owner` to move again."""
        self._holding(owner).is_pinned = False

    def placements(self) -> dict[str, Placement]:
        """The placement of each owner, as a copy."""
        own = {owner: self._placement(held) for owner, held in self._held.items()}
        beside = self._beside
        return own if beside is None else {owner: beside.dressed(owner, own[owner]) for owner in own}

    def check(self) -> None:
        """Raise PoolError, with the numbers, unless every slot is either free or has exactly one owner."""
        self._check()
        if self._beside is not None:
            self._beside.check()

    def refresh(self) -> bool:
        """Learn from released requests; return True if anything changed. Cheap if nothing is new."""
        return False

    @abstractmethod
    def stats(self) -> PoolStats:
        """Present figures, and counters that never fall."""

    @abstractmethod
    def _reserve(self, owner: str, demand: Demand) -> Grant | None:
        """`reserve` under the policy, which enters the owner's holding in `_held`."""

    @abstractmethod
    def _grow(self, owner: str, held: Held, n_positions: int) -> Grant | None:
        """`grow` under the policy."""

    @abstractmethod
    def _release(self, held: Held, answer_tokens: int | None) -> None:
        """Take back the block of a request that has ended, as the policy does. answer_tokens: as for
        `release`."""

    @abstractmethod
    def _placement(self, held: Held) -> Placement:
        """The slots of a holding."""

    @abstractmethod
    def _check(self) -> None:
        """`check` of the blocks."""

    def _holding(self, owner: str) -> Held:
        try:
            return self._held[owner]
        except KeyError:
            raise PoolError(f"{owner!r} holds no slots") from None

    def _dressed(self, owner: str, grant: Grant) -> Grant:
        assert self._beside is not None
        dressed = self._beside.dressed
        moves = tuple(move._replace(placement=dressed(move.owner, move.placement)) for move in grant.moves)
        return Grant(dressed(owner, grant.placement), moves)


KvPool: TypeAlias = BlockPool[Any]
"""A pool under any policy."""
