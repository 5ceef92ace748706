"""How long answers have become lately, and the bounds of buckets that this suggests. Pure; no pool in it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from phasewise.serving.pools.contract import ALIGNMENT

FEWEST = 16
"""Answers before anything is learnt from them."""


class Lengths:
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
        """In order of size."""
        return tuple(self._sorted)


class Bounds(NamedTuple):
    """What allocation decides by, all learnt at one time; swapped as a whole."""

    buckets: tuple[int, ...] = ()
    """Longest answers of the buckets, ascending, multiples of the alignment. None learnt yet: empty."""
    lengths: tuple[int, ...] = ()
    """Those they were learnt from, in order of size."""

    def bucket_for(self, answer_tokens: float) -> int | None:
        """The smallest bucket that holds such an answer; None where only the large one does."""
        index = bisect_left(self.buckets, answer_tokens)
        return index if index < len(self.buckets) else None

    def outlived(self, answer_tokens: int, level: float) -> int | None:
        """Quantile `level` of the answers longer than this; None where no recent one was."""
        start = bisect_right(self.lengths, answer_tokens)
        longer = self.lengths[start:]
        return quantile(longer, level) if longer else None


def quantile(ordered: Sequence[int], level: float) -> int:
    """The least of the values that a share `level` of them does not exceed."""
    return ordered[min(len(ordered), max(1, math.ceil(level * len(ordered)))) - 1]


def learnt(lengths: tuple[int, ...], n_buckets: int, top_level: float) -> Bounds:
    """At most `n_buckets` bounds that equally many answers fall between, the last at quantile `top_level`."""
    if len(lengths) < FEWEST:
        return Bounds()
    levels = (top_level * (at + 1) / n_buckets for at in range(n_buckets))
    bounds = {-(-max(1, quantile(lengths, level)) // ALIGNMENT) * ALIGNMENT for level in levels}
    return Bounds(tuple(sorted(bounds)), lengths)
