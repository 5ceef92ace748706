"""The contract of every KV pool, whatever its policy. Integers only; no clock, no tensor, no thread.

Positions of the cache are slots. Every block that a pool hands out begins at a multiple of `ALIGNMENT` slots
and is a multiple of it long. Five promises, which `tests/serving/pools` holds against every policy:

- no slot has two owners, and free + used = all, after every call;
- an empty pool takes any request of at most `longest` positions and lets it grow to its end;
- what a call answers with None has changed nothing;
- a pinned block stays where it is;
- the copies of successive grants may be carried out later, in their order, as long as nothing is computed in
  between: a copy's source is given back by the very call that returns it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from phasewise.serving.batch import KvCopy
from phasewise.serving.pools.state_places import StatePlaces

ALIGNMENT = 16
"""Slots of a panel of keys: blocks begin and end at its multiples."""

KV_CHUNK = 128
"""Positions of a run in a placement by table (PW_CHUNK of the kernels)."""


class PoolError(AssertionError):
    """The pool was misused or has lost count: a bug in its caller, never a user's mistake."""


class Estimate(NamedTuple):
    """The expected length of an answer."""

    output_tokens: float
    uncertainty: float
    """0: sure; 1: no idea."""


class Demand(NamedTuple):
    """The need of a request. `held_tokens <= most_tokens`."""

    held_tokens: int
    """Positions needed at once: the prompt, and the answer so far where the request ran before."""
    most_tokens: int
    """Prompt and max_tokens: never exceeded."""
    prompt_tokens: int
    estimate: Estimate | None = None


class Placement(NamedTuple):
    """The place of a request's positions: slot `base + position`, or by `table`."""

    base: int
    n_slots: int
    """Positions that it can hold."""
    table: tuple[int, ...] | None = None
    """Slots at which its runs of `KV_CHUNK` positions begin; None where all are one run."""
    ring: tuple[int, int] | None = None
    """First slot and slots of its ring, in layers that keep rings (`pools.wrapped`). It never moves."""
    state: int | None = None
    """The place of its state, in layers that keep one (`pools.wrapped`)."""

    def slot(self, position: int) -> int:
        """The slot of a position."""
        if self.table is None:
            return self.base + position
        return self.table[position // KV_CHUNK] + position % KV_CHUNK


class Move(NamedTuple):
    """`owner` lies at `placement` now; what it had written is to be copied there."""

    owner: str
    placement: Placement
    copy: KvCopy


class Grant(NamedTuple):
    """Room that was given, and the moves that made it, in the order of the copies."""

    placement: Placement
    moves: tuple[Move, ...] = ()


class BucketStats(NamedTuple):
    """One size of block that new requests get, and what became of those that ended by themselves."""

    name: str
    """"1" is the smallest; the last is "large". Bounds move under a name as they are learnt."""
    bound_tokens: int
    """Longest answer it is meant for."""
    blocks_used: int
    slots_used: int
    slots_ended: int
    """Slots of all blocks that finished requests have given back. Never falls."""
    slots_wasted: int
    """Part of `slots_ended` that neither prompt nor answer filled. Never falls."""


class PoolStats(NamedTuple):
    """The state of a pool, and what has happened in it. Counts never fall."""

    policy: str
    slots_used: int
    slots_free: int
    largest_reservable: int
    buckets: tuple[BucketStats, ...] = ()
    migrations: int = 0
    """Times that a request was moved, for its own growth or for another's room."""
    overflows: int = 0
    """Requests that outgrew their first block."""
    to_large: int = 0
    """Requests that began in the large bucket: too unsure, or expected to become longer than
    every bound."""
    estimated: int = 0
    """Requests with an estimate that ended by themselves."""
    mispredicted: int = 0
    """Answers that ended in another bucket than the one estimated."""
    refreshes: int = 0
    """Times that new bounds came into use."""


@dataclass(frozen=True, slots=True)
class Rings:
    """Slots of all rings, and of the longest: enough for the largest window and what one step writes."""

    first_slot: int
    """Slots of the other layers come before."""
    n_slots: int
    longest: int
    """A multiple of KV_CHUNK."""
    window: int
    """The largest window of the layers that keep rings."""

    def __post_init__(self) -> None:
        assert self.longest % KV_CHUNK == 0, self
        assert self.n_slots >= self.longest > self.window, self


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of all policies; each reads its own."""

    longest_request: int
    """Positions of the longest request that may come: the model's context, or less."""
    n_buckets: int = 8
    """odma: most learnt buckets below the large one."""
    alpha: float = 0.25
    """odma: an estimate of uncertainty u counts 1 + alpha u times."""
    tau: float = 0.98
    """odma: an estimate less sure than this is none."""
    top_level: float = 0.98
    """odma: share of the answers that the buckets hold; the large one has the rest."""
    large_level: float = 0.9
    """odma: the large bucket hands out this quantile of the answers that lasted as long as this one has."""
    reserve_share: float = 0.15
    """odma: share of the slots that no request is promised: the large bucket's reserve. Less, where
    all that run could not ask for that many more."""
    window: int = 1024
    """odma: realised lengths that the bounds are learnt from."""
    refresh_every: int = 16
    """odma: new realised lengths before bounds are learnt again."""
    page_slots: int = KV_CHUNK
    """paged: positions of a page."""


def check_demand(owner: str, demand: Demand, owners: Container[str]) -> None:
    """Raise unless this can be a new owner's demand."""
    if owner in owners:
        raise PoolError(f"{owner!r} holds slots already")
    if not 1 <= demand.held_tokens <= demand.most_tokens or demand.prompt_tokens > demand.held_tokens:
        raise PoolError(f"no request of {owner!r} can need {demand}")


class KvPool(Protocol):
    """`n_slots` KV slots under one policy. One thread calls all of it but `refresh`."""

    @property
    def n_slots(self) -> int: ...

    @property
    def longest(self) -> int:
        """Positions of the longest request that the empty pool holds to its end."""
        ...

    @property
    def rings(self) -> Rings | None:
        """The rings that its placements have; None: they have none."""
        ...

    @property
    def states(self) -> StatePlaces | None:
        """The places for states that its placements have; None: they have none."""
        ...

    def reserve(self, owner: str, demand: Demand) -> Grant | None:
        """Room for `demand.held_tokens` at least, or None: not now. One placement per owner."""

    def grow(self, owner: str, n_positions: int) -> Grant | None:
        """Room for `n_positions` (at most the demand's `most_tokens`), or None: not now."""

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        """Give back all that `owner` holds. `answer_tokens`: how long its answer became, to learn from;
        None where it did not end by itself."""

    def pin(self, owner: str) -> None:
        """Leave the block of `owner` where it is, until `unpin` or `release`. It must not grow meanwhile."""

    def unpin(self, owner: str) -> None:
        """The block of `owner` may move again."""

    def placements(self) -> dict[str, Placement]:
        """The placement of each request, as a copy."""
        ...

    def stats(self) -> PoolStats: ...

    def check(self) -> None:
        """Raise PoolError, with the numbers, unless every slot is either free or has exactly one owner."""

    def refresh(self) -> bool:
        """Learn from what was released, for requests to come; whether anything changed. Cheap where there is
        nothing new."""
        ...
