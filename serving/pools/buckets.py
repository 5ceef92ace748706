"""ODMA's buckets: their bounds follow the answers of late (Zou et al., section III).

An estimate of uncertainty u counts 1 + alpha u times, and the smallest bucket that holds it is its request's.
The large bucket takes requests without an estimate, those whose u exceeds tau, and answers that outgrow their
block. It has no one size: it hands out a quantile of what answers of late became that were as long as this
one is already, so that a high max_tokens that few answers reach costs nothing.
"""

from __future__ import annotations

import math
from collections import deque

from phasewise.serving.pools.bounds import Bounds, Lengths, learnt
from phasewise.serving.pools.contiguous import Size
from phasewise.serving.pools.contract import Demand, PoolSettings

UNLEARNT_ANSWER_TOKENS = 128
"""Room for an answer that nothing is known of, before any answer has ended."""


class LearntSizes:
    """Sizes of buckets that `refresh` learns anew from what has ended."""

    policy = "odma"

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._news: deque[int] = (
            deque()
        )  # ended, and not looked at by `refresh`; appended and popped by two threads
        self._lengths = Lengths(settings.window)  # refresh's own
        self._learnt = Bounds()
        self._to_large = self._estimated = self._mispredicted = self._refreshes = 0

    @property
    def bounds(self) -> tuple[int, ...]:
        return self._learnt.buckets

    @property
    def large_bound(self) -> int:
        learnt = self._learnt
        return learnt.lengths[-1] if learnt.lengths else self._settings.longest_request

    def first(self, demand: Demand) -> Size:
        answered = demand.held_tokens - demand.prompt_tokens
        expected = self._expected(demand)
        if expected is None or expected <= answered:
            self._to_large += 1
            return self._large(demand, answered + 1, self._settings.unknown_level)
        bucket = self._learnt.bucket_for(expected)
        if bucket is not None:
            return self._size(demand, self._learnt.buckets[bucket], bucket)
        self._to_large += 1
        return self._large(demand, math.ceil(expected), self._settings.large_level)

    def next(self, demand: Demand, n_positions: int) -> Size:
        return self._large(demand, n_positions - demand.prompt_tokens, self._settings.large_level)

    def ended(self, demand: Demand, answer_tokens: int) -> None:
        self._news.append(answer_tokens)
        expected = self._expected(demand)
        if expected is not None:
            self._estimated += 1
            learnt = self._learnt
            self._mispredicted += learnt.bucket_for(expected) != learnt.bucket_for(answer_tokens)

    def refresh(self) -> bool:
        if len(self._news) < self._settings.refresh_every:
            return False
        for _ in range(len(self._news)):
            self._lengths.add(self._news.popleft())
        before = self._learnt
        found = learnt(self._lengths.frozen(), self._settings.n_buckets, self._settings.top_level)
        if found.buckets == before.buckets:
            found = found._replace(buckets=before.buckets)  # the same object: nothing goes back to the arena
        self._learnt = found
        self._refreshes += found.buckets is not before.buckets
        return found.buckets is not before.buckets

    def counts(self) -> dict[str, int]:
        return {
            "to_large": self._to_large,
            "estimated": self._estimated,
            "mispredicted": self._mispredicted,
            "refreshes": self._refreshes,
        }

    def _expected(self, demand: Demand) -> float | None:
        """The estimate, as much longer as it is unsure; None where it is none."""
        estimate = demand.estimate
        if estimate is None or estimate.uncertainty > self._settings.tau:
            return None
        return estimate.output_tokens * (1 + self._settings.alpha * estimate.uncertainty)

    def _large(self, demand: Demand, at_least: int, level: float) -> Size:
        """What answers of at least so many tokens became; twice as many where none of late was as long."""
        became = self._learnt.outlived(at_least - 1, level)
        if became is None:
            became = max(2 * at_least, UNLEARNT_ANSWER_TOKENS)
        return self._size(demand, became, None)

    def _size(self, demand: Demand, answer_tokens: int, bucket: int | None) -> Size:
        return Size(min(demand.most_tokens, demand.prompt_tokens + answer_tokens), bucket)
