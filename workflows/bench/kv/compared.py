"""KV policies that `bench kv` compares with the server's: static blocks, S3's buckets, whole ODMA buckets.

Each follows its paper, so that none moves one request to make room for another.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from phasewise.serving.pools.buckets import LearntSizes, limited_to
from phasewise.serving.pools.contiguous import ContiguousPool, Size, Sizes
from phasewise.serving.pools.contract import Demand, PoolSettings
from phasewise.serving.pools.opening import POLICIES
from phasewise.serving.pools.pool import KvPool


class WholeBuckets(LearntSizes):
    """ODMA as in the paper: a request gets the block for its whole bucket at once."""

    squeezes = False

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(replace(settings, reserve_share=0.0))

    def _size(self, demand: Demand, needed: int) -> Size:
        expected = self._expected_beyond(demand, needed)
        bucket = None if expected is None else self._learnt.bucket_for(expected)
        if bucket is None:
            whole = self._large(max(needed, math.ceil(expected or 0)))
        else:
            whole = self._learnt.buckets[bucket]
        return limited_to(demand, whole, whole, bucket)


class StaticSizes(Sizes):
    """Static pre-allocation: `longest_request` positions for every request, so that nothing ever grows."""

    policy = "static"

    def __init__(self, longest_request: int) -> None:
        self.large_bound = longest_request

    def first(self, demand: Demand) -> Size:
        return Size(self.large_bound, self.large_bound, None)

    def next(self, demand: Demand, n_positions: int) -> Size:
        return Size(n_positions, n_positions, None)


class FixedSizes(Sizes):
    """S3's buckets of equal width, `n_buckets` up to `longest_answer` tokens (Jin et al., NeurIPS 2023).

    A request gets the bucket that its estimate falls into, without an estimate the longest. An answer that
    outgrows it moves to a block with room for twice the answer, as S3's supervisor does.
    """

    policy = "fixed"

    def __init__(self, longest_answer: int, n_buckets: int) -> None:
        self.bounds = tuple(-(-longest_answer * bucket // n_buckets) for bucket in range(1, n_buckets + 1))
        self.large_bound = longest_answer
        self._estimated = self._mispredicted = 0

    def first(self, demand: Demand) -> Size:
        answered = demand.held_tokens - demand.prompt_tokens
        expected = self.large_bound if demand.estimate is None else demand.estimate.output_tokens
        bucket = self._bucket(max(expected, answered + 1))
        return self._size(demand, self.bounds[bucket], bucket)

    def next(self, demand: Demand, n_positions: int) -> Size:
        doubled = 2 * (n_positions - 1 - demand.prompt_tokens)
        return self._size(demand, doubled, None)

    def ended(self, demand: Demand, answer_tokens: int) -> None:
        if demand.estimate is not None:
            self._estimated += 1
            predicted = self._bucket(demand.estimate.output_tokens)
            self._mispredicted += predicted != self._bucket(answer_tokens)

    def counts(self) -> dict[str, int]:
        return {"estimated": self._estimated, "mispredicted": self._mispredicted}

    def _bucket(self, answer_tokens: float) -> int:
        return min(bisect_left(self.bounds, answer_tokens), len(self.bounds) - 1)

    def _size(self, demand: Demand, answer_tokens: int, bucket: int | None) -> Size:
        n_positions = min(demand.most_tokens, demand.prompt_tokens + answer_tokens)
        return Size(n_positions, n_positions, bucket)


@dataclass(frozen=True, slots=True)
class ComparedSettings(PoolSettings):
    """Settings of all policies that are compared."""

    answer_tokens: int | None = None
    """Policy `fixed`: longest answer in tokens, up to which buckets are cut; None: the longest request."""
    n_fixed: int = 10
    """Policy `fixed`: number of buckets."""


KV_POLICIES: Mapping[str, Callable[[int, ComparedSettings], KvPool]] = {
    **POLICIES,
    "static": lambda n_slots, own: ContiguousPool(n_slots, StaticSizes(own.longest_request)),
    "fixed": lambda n_slots, own: ContiguousPool(
        n_slots, FixedSizes(own.answer_tokens or own.longest_request, own.n_fixed)
    ),
    "odma-whole": lambda n_slots, own: ContiguousPool(n_slots, WholeBuckets(own)),
    "paged-16": lambda n_slots, own: POLICIES["paged"](n_slots, replace(own, page_slots=16)),
}
"""The policies that `bench kv` compares, by name: those that serve come first."""

UNESTIMATED = ("static", "paged", "paged-16")
