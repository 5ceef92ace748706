"""The recent lengths of answers, and the bounds of buckets that they suggest. Pure; no pool in it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from itertools import accumulate
from typing import NamedTuple

from phasewise.serving.pools.contract import ALIGNMENT

FEWEST = 16
"""Answers before anything is learnt from them."""


class LengthWindow:
    """The last `window` answers' lengths, in order of size as well."""

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
        """The lengths in order of size, as a copy."""
        return tuple(self._sorted)


class PoolBounds(NamedTuple):
    """The bounds that allocation decides by, all learnt at one time; swapped as a whole."""

    buckets: tuple[int, ...] = ()
    """Longest answers of the buckets, ascending, multiples of the alignment. None learnt yet: empty."""
    lengths: tuple[int, ...] = ()
    """The lengths that the bounds were learnt from, in order of size."""
    sums: tuple[int, ...] = ()
    """Prefix sums: `sums[i]` is the sum of the first i lengths."""

    def bucket_for(self, answer_tokens: float) -> int | None:
        """The smallest bucket that holds such an answer; None where only the large one does."""
        index = bisect_left(self.buckets, answer_tokens)
        return index if index < len(self.buckets) else None

    def outlived(self, answer_tokens: int, level: float) -> int | None:
        """Quantile `level` of the recent answers of at least `answer_tokens`; None where there are none."""
        start = bisect_left(self.lengths, answer_tokens)
        n_longer = len(self.lengths) - start
        return self.lengths[start + _rank(n_longer, level)] if n_longer else None

    def mean_outlived(self, answer_tokens: int) -> float | None:
        """Mean length of the recent answers of at least `answer_tokens`; None where there are none."""
        start = bisect_left(self.lengths, answer_tokens)
        n_longer = len(self.lengths) - start
        return (self.sums[-1] - self.sums[start]) / n_longer if n_longer else None


def _rank(n: int, level: float) -> int:
    """The index among `n` ordered values of the least that a share `level` of them does not exceed."""
    return min(n, max(1, math.ceil(level * n))) - 1


def learnt(lengths: tuple[int, ...], n_buckets: int, top_level: float) -> PoolBounds:
    """At most `n_buckets` bounds that equally many answers fall between, the last at quantile `top_level`."""
    if len(lengths) < FEWEST:
        return PoolBounds()
    levels = (top_level * (bucket + 1) / n_buckets for bucket in range(n_buckets))
    bounds = {-(-max(1, lengths[_rank(len(lengths), level)]) // ALIGNMENT) * ALIGNMENT for level in levels}
    return PoolBounds(tuple(sorted(bounds)), lengths, (0, *accumulate(lengths)))
