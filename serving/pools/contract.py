"""The contract of every KV pool, whatever its policy. Integers only; no clock, no tensor, no thread.

A slot holds one position of the KV cache. Every block begins at a multiple of `ALIGNMENT` slots, and its
length is a multiple too. Five promises, which `tests/serving/pools` checks for every policy:
- no slot has two owners, and free + used = all, after every call;
- an empty pool takes any request of at most `n_slots` positions and lets it grow to its end;
- a call that returns None has changed nothing;
- a pinned block stays where it is;
- the copies of successive grants may be done later, in order, if nothing is computed in between: a copy's
  source is freed by the very call that returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phasewise.serving.batch import KV_CHUNK, KvCopy

ALIGNMENT = 16
"""Slots of a panel of keys: blocks begin and end at its multiples."""


class PoolError(AssertionError):
    """The pool was misused or has lost count: a bug, never a user's mistake."""


class Estimate(NamedTuple):
    """Expected length of an answer."""

    output_tokens: float
    uncertainty: float
    """From 0 (certain) to 1 (unknown)."""


class Demand(NamedTuple):
    """Slots that a request needs. `held_tokens <= most_tokens`."""

    held_tokens: int
    """Positions needed at once: the prompt, and the answer so far if the request ran before."""
    most_tokens: int
    """Prompt and max_tokens together: never exceeded."""
    prompt_tokens: int
    estimate: Estimate | None = None


class Placement(NamedTuple):
    """Slots of a request's positions: slot `base + position`, or by `table`."""

    base: int
    n_slots: int
    """Number of positions that fit into the block."""
    table: tuple[int, ...] | None = None
    """First slots of the runs of `KV_CHUNK` positions; None: one contiguous run."""
    ring: tuple[int, int] | None = None
    """First slot and number of slots of the request's ring (`pools.pool`), which never moves."""
    state: int | None = None
    """Place of the request's state, in layers that keep one (`pools.pool`)."""

    def slot(self, position: int) -> int:
        if self.table is None:
            return self.base + position
        return self.table[position // KV_CHUNK] + position % KV_CHUNK


class Move(NamedTuple):
    """New placement of `owner`, to which its keys and values must be copied."""

    owner: str
    placement: Placement
    copy: KvCopy


class Grant(NamedTuple):
    """A placement, and the moves that made room for it, in the order of their copies."""

    placement: Placement
    moves: tuple[Move, ...] = ()


class BucketStats(NamedTuple):
    """Figures of one bucket: its present blocks, and those of requests that ended by themselves."""

    name: str
    """"1" is the smallest bucket, the last is "large". A name's bound changes as bounds are learnt."""
    bound_tokens: int
    """Longest answer of the bucket."""
    blocks_used: int
    slots_used: int
    slots_ended: int
    """Counter of slots that ended requests gave back."""
    slots_wasted: int
    """Counter of `slots_ended` that neither prompt nor answer filled."""


class PoolStats(NamedTuple):
    """Present figures of a pool, and counters that never fall."""

    policy: str
    slots_used: int
    slots_free: int
    largest_reservable: int
    buckets: tuple[BucketStats, ...] = ()
    migrations: int = 0
    """Number of times that a request was moved, to grow or to make room."""
    overflows: int = 0
    """Number of requests that outgrew their first bucket."""
    to_large: int = 0
    """Number of requests that began in the large bucket: too uncertain, or expected to be too long."""
    estimated: int = 0
    """Number of requests with an estimate that ended by themselves."""
    mispredicted: int = 0
    """Number of answers that ended in another bucket than the estimated one."""
    refreshes: int = 0
    """Number of times that new bounds came into use."""


@dataclass(frozen=True, slots=True)
class Rings:
    """Slots of the rings of sliding-window layers: `longest` holds the largest window and one step's rows."""

    first_slot: int
    """First slot of the rings, after the slots of all other layers."""
    n_slots: int
    longest: int
    """Slots of the longest ring, a multiple of KV_CHUNK."""
    window: int
    """The largest window of the layers that keep rings."""

    def __post_init__(self) -> None:
        assert self.longest % KV_CHUNK == 0, self
        assert self.n_slots >= self.longest > self.window, self


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of all policies; each policy reads its own."""

    longest_request: int
    """Positions of the longest request to expect: the model's context, or less."""
    n_buckets: int = 8
    """odma: most learnt buckets, without the large one."""
    alpha: float = 0.25
    """odma: an estimate of uncertainty u counts 1 + alpha u times."""
    tau: float = 0.98
    """odma: uncertainty above which an estimate is ignored."""
    top_level: float = 0.98
    """odma: share of answers that fit the learnt buckets; the large one has the rest."""
    large_level: float = 0.9
    """odma: quantile of the answers at least as long that sets a block's size in the large bucket."""
    reserve_share: float = 0.15
    """odma: share of the slots that no request is promised, the large bucket's reserve; less if the running
    requests could not need as much."""
    window: int = 1024
    """odma: number of recent answers from which bounds are learnt."""
    refresh_every: int = 16
    """odma: number of new answers before bounds are learnt again."""
    page_slots: int = KV_CHUNK
    """paged: positions of a page."""
