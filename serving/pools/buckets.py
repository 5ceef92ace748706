"""ODMA's buckets (Zou et al., section III), whose bounds follow recent answers.

An estimate of uncertainty u counts 1 + alpha u times, and its request belongs to the smallest bucket that
holds it. A request without an estimate is expected to become as long as the mean of recent answers that
lasted as long as it has. The large bucket takes requests whose u exceeds tau, and answers that outgrow every
bound; its blocks have a quantile of the recent answers at least as long, so that an unused high max_tokens
costs nothing. A request begins with a block for the smallest bound, and gets the next larger one when that is
full, up to its own bucket. The pool admits requests by the expected needs of all.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from itertools import accumulate
from typing import NamedTuple

from phasewise.serving.pools.contiguous import Size, Sizes
from phasewise.serving.pools.contract import ALIGNMENT, Demand, PoolSettings

FEWEST = 16
"""Fewest answers from which bounds are learnt."""


class LengthWindow:
    """Lengths of the last `window` answers, also in order of size."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, answer_tokens: int) -> None:
        self._recent.append(answer_tokens)
        insort(self._sorted, answer_tokens)
        if len(self._recent) > self.window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def frozen(self) -> tuple[int, ...]:
        """A sorted copy of the lengths."""
        return tuple(self._sorted)


class PoolBounds(NamedTuple):
    """The learnt bounds that allocation uses, replaced as a whole."""

    buckets: tuple[int, ...] = ()
    """Longest answers of the buckets, ascending, multiples of ALIGNMENT; empty: nothing is learnt yet."""
    lengths: tuple[int, ...] = ()
    """The answer lengths from which the bounds were learnt, sorted."""
    sums: tuple[int, ...] = ()
    """Prefix sums: `sums[i]` is the sum of the first i lengths."""

    def bucket_for(self, answer_tokens: float) -> int | None:
        """Index of the smallest bucket that holds such an answer; None: only the large bucket does."""
        index = bisect_left(self.buckets, answer_tokens)
        return index if index < len(self.buckets) else None

    def outlived(self, answer_tokens: int, level: float) -> int | None:
        """Quantile `level` of the recent answers of at least `answer_tokens`; None: there are none."""
        start = bisect_left(self.lengths, answer_tokens)
        n_longer = len(self.lengths) - start
        return self.lengths[start + _rank(n_longer, level)] if n_longer else None

    def mean_outlived(self, answer_tokens: int) -> float | None:
        """Mean length of the recent answers of at least `answer_tokens`; None: there are none."""
        start = bisect_left(self.lengths, answer_tokens)
        n_longer = len(self.lengths) - start
        return (self.sums[-1] - self.sums[start]) / n_longer if n_longer else None


def _rank(n: int, level: float) -> int:
    """Index, among `n` sorted values, of the least value that a share `level` of them does not exceed."""
    return min(n, max(1, math.ceil(level * n))) - 1


def learnt(lengths: tuple[int, ...], n_buckets: int, top_level: float) -> PoolBounds:
    """Learn up to `n_buckets` bounds with equal numbers of answers between, the last at quantile
    `top_level`."""
    if len(lengths) < FEWEST:
        return PoolBounds()
    levels = (top_level * (bucket + 1) / n_buckets for bucket in range(n_buckets))
    bounds = {-(-max(1, lengths[_rank(len(lengths), level)]) // ALIGNMENT) * ALIGNMENT for level in levels}
    return PoolBounds(tuple(sorted(bounds)), lengths, (0, *accumulate(lengths)))


UNLEARNT_ANSWER_TOKENS = 128
"""Answer tokens to reserve at least in the large bucket before any answer has ended."""


class LearntSizes(Sizes):
    """Block sizes by buckets, whose bounds `refresh` learns from ended answers."""

    policy = "odma"
    squeezes = True

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self.reserve_share = settings.reserve_share
        self.large_bound = settings.longest_request
        self._news: deque[int] = deque()  # ended, not yet looked at; one thread appends, one pops
        self._lengths = LengthWindow(settings.window)  # refresh's own
        self._learnt = PoolBounds()  # swapped as a whole by refresh
        self._estimated = self._mispredicted = self._refreshes = 0

    def first(self, demand: Demand) -> Size:
        return self._size(demand, demand.held_tokens - demand.prompt_tokens + 1)

    def next(self, demand: Demand, n_positions: int) -> Size:
        return self._size(demand, n_positions - demand.prompt_tokens)

    def ended(self, demand: Demand, answer_tokens: int) -> None:
        self._news.append(answer_tokens)
        expected = self._expected(demand)
        if expected is not None:
            bounds = self._learnt
            self._estimated += 1
            self._mispredicted += bounds.bucket_for(expected) != bounds.bucket_for(answer_tokens)

    def refresh(self) -> bool:
        if len(self._news) < self._settings.refresh_every:
            return False
        while self._news:
            self._lengths.add(self._news.popleft())
        learnt_now = learnt(self._lengths.frozen(), self._settings.n_buckets, self._settings.top_level)
        is_new = learnt_now.buckets != self.bounds
        if is_new:  # else the same object: no change
            self.bounds = learnt_now.buckets
        self._learnt = learnt_now._replace(buckets=self.bounds)
        self.large_bound = max((*self.bounds, *learnt_now.lengths[-1:]), default=self.large_bound)
        self._refreshes += is_new
        return is_new

    def counts(self) -> dict[str, int]:
        return {
            "estimated": self._estimated,
            "mispredicted": self._mispredicted,
            "refreshes": self._refreshes,
        }

    def _typical(self, demand: Demand, needed: int) -> float | None:
        """Mean of recent answers of at least `needed` tokens, up to the request's limit; None: no answers."""
        mean = self._learnt.mean_outlived(needed)
        return None if mean is None else min(mean, demand.most_tokens - demand.prompt_tokens)

    def _expected(self, demand: Demand) -> float | None:
        """The estimated answer length, increased by its uncertainty; None: there is no usable estimate."""
        estimate = demand.estimate
        if estimate is None or estimate.uncertainty > self._settings.tau:
            return None
        return estimate.output_tokens * (1 + self._settings.alpha * estimate.uncertainty)

    def _expected_beyond(self, demand: Demand, needed: int) -> float | None:
        """The estimated answer length; None: there is none, or the answer has outgrown it."""
        expected = self._expected(demand)
        return None if expected is not None and expected < needed else expected

    def _size(self, demand: Demand, needed: int) -> Size:
        """Size of a block for an answer of at least `needed` tokens."""
        bounds = self._learnt
        expected = self._expected_beyond(demand, needed)
        bucket = None if expected is None else bounds.bucket_for(expected)
        if bucket is not None:
            whole = bounds.buckets[bucket]
        else:
            whole = self._large(max(needed, math.ceil(expected or 0)))
        typical = self._typical(demand, needed)
        if expected is None and demand.estimate is None and typical is not None:
            bucket = bounds.bucket_for(typical)
        end = math.ceil(expected or typical or whole)
        rung = bounds.bucket_for(needed)
        block = whole if rung is None else bounds.buckets[rung]
        return limited_to(demand, block if expected is None else min(block, end), end, bucket)

    def _large(self, at_least: int) -> int:
        """A quantile of recent answers of at least `at_least` tokens, else twice `at_least`."""
        became = self._learnt.outlived(at_least, self._settings.large_level)
        return max(2 * at_least, UNLEARNT_ANSWER_TOKENS) if became is None else became


def limited_to(demand: Demand, answer_tokens: int, end_tokens: int, bucket: int | None) -> Size:
    """A size of prompt and answer, limited to what the request can ever fill."""
    most = demand.most_tokens
    prompt = demand.prompt_tokens
    return Size(min(most, prompt + answer_tokens), min(most, prompt + end_tokens), bucket)
