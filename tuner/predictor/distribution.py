"""The distribution of one answer's length: a share for each bin of lengths, cut at the request's limit.

More slots for one answer are fewer for others. At a price per token the best room is the length c that
maximises P(length <= c) - price x c, a corner of the upper hull of the distribution function. With many
unlike requests this holds more answers in the same memory than one quantile for all. The higher the price,
the less room, always.

Estimates are corrected by the lengths of finished answers, without new training. `RunningRatio` keeps the
mean of estimates right. `RunningPrice` keeps the share of answers that fit their estimated room: each
realised length tells the highest price at which its own forecast would still have had room for it, and the
price in use is one that the wanted share of recent answers could have paid (a running conformal correction).
Forecasts that were too short lower the price, towards room for the whole limit; forecasts that were too long
raise it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class LengthDistribution:
    """The shares of an answer's lengths: bin i holds lengths above `bounds[i - 1]` up to `bounds[i]`; the
    last bin is open. Lengths beyond `limit` count as `limit`."""

    bounds: Array
    shares: Array
    limit: int

    def room(self, price: float) -> int:
        """The best room for the answer at a price per token; at price 0, the limit."""
        lengths, prices = self._hull
        corner = int(np.searchsorted(-prices, -price, side="right"))  # prices fall along the hull
        return int(lengths[corner])

    def price_of(self, output_tokens: int) -> float:
        """The highest price at which there is still room for `output_tokens`."""
        lengths, prices = self._hull
        corner = int(np.searchsorted(lengths, min(output_tokens, self.limit)))
        return float(prices[corner - 1]) if corner else float("inf")

    @cached_property
    def _hull(self) -> tuple[Array, Array]:
        """Corners of the upper hull of P(length <= c), from (0, 0) to (limit, 1): lengths, and slopes
        between."""
        n_within = int(np.searchsorted(self.bounds, self.limit))
        lengths = [0.0, *self.bounds[:n_within], float(self.limit)]
        reached = [0.0, *np.cumsum(self.shares[:n_within]), 1.0]
        corners = [0]
        for point in range(1, len(lengths)):
            while len(corners) > 1 and _slope(lengths, reached, corners[-2], corners[-1]) <= _slope(
                lengths, reached, corners[-1], point
            ):
                corners.pop()
            corners.append(point)
        slopes = [_slope(lengths, reached, left, right) for left, right in pairwise(corners)]
        return np.array([lengths[corner] for corner in corners]), np.array(slopes)

    def share_within(self, output_tokens: float) -> float:
        """P(length <= output_tokens), with lengths even within a bin."""
        return float(self.shares_within(np.array([output_tokens]))[0])

    def shares_within(self, output_tokens: npt.NDArray[Any]) -> Array:
        """P(length <= n) for each n of `output_tokens`, with lengths even within a bin."""
        lengths = np.concatenate([[0.0], self.bounds])
        reached = np.interp(output_tokens, lengths, np.concatenate([[0.0], np.cumsum(self.shares[:-1])]))
        return np.where(output_tokens >= self.limit, 1.0, reached)

    def quantile(self, share: float) -> int:
        """The least length within which a share `share` of such answers ends."""
        lengths = np.concatenate([[0.0], self.bounds])
        reached = np.concatenate([[0.0], np.cumsum(self.shares[:-1])])
        if share > reached[-1]:
            return self.limit
        return max(1, min(self.limit, math.ceil(float(np.interp(share, reached, lengths)))))

    @property
    def mean(self) -> float:
        """The expected length, lengths even within a bin; the open bin counts as twice the last bound."""
        lengths = np.minimum(np.concatenate([[0.0], self.bounds]), self.limit)
        within = float(np.dot(self.shares[:-1], (lengths[:-1] + lengths[1:]) / 2))
        return max(1.0, within + float(self.shares[-1]) * min(self.limit, 2 * float(self.bounds[-1])))

    @property
    def uncertainty(self) -> float:
        """The entropy over bins, with those beyond the limit as one: 0 sure, 1 no idea."""
        limit_bin = int(np.searchsorted(self.bounds, self.limit))
        merged = np.append(self.shares[:limit_bin], self.shares[limit_bin:].sum())
        merged = merged[merged > 0]
        entropy = -float((merged * np.log(merged)).sum())
        return min(1.0, max(0.0, entropy / float(np.log(len(self.shares)))))


def _slope(lengths: list[float], reached: list[float], left: int, right: int) -> float:
    """Share gained per token from one hull corner to the other."""
    return (reached[right] - reached[left]) / (lengths[right] - lengths[left])


WINDOW = 1024
FEWEST = 64
"""The fewest finished answers from which means are corrected."""


class RunningPrice:
    """The price of room at which the share `hold` of recent answers fit. Not for several threads at once."""

    def __init__(self, trained: Sequence[float], hold: float, window: int = WINDOW) -> None:
        """Begin with prices that training answers could pay. `hold`: the share of answers that should fit."""
        self._hold = hold
        self._window = window
        self._recent: deque[float] = deque(_some(trained, window))  # until as many real ones have ended
        self._ordered = sorted(self._recent)

    @property
    def price(self) -> float:
        return price_holding(self._ordered, self._hold)

    def observe(self, price: float) -> None:
        """Record the highest price at which an answer's forecast had room for it."""
        self._recent.append(price)
        insort(self._ordered, price)
        if len(self._recent) > self._window:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]


def _some(trained: Sequence[float], window: int) -> list[float]:
    """At most `window` of the prices, evenly chosen, in random order."""
    ordered = sorted(trained)
    n = min(window, len(ordered))
    evenly = [ordered[(2 * index + 1) * len(ordered) // (2 * n)] for index in range(n)]
    Random(0).shuffle(evenly)
    return evenly


class RunningRatio:
    """The factor by which the estimated means of recent answers would have been right. Not for several
    threads at once."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._recent: deque[tuple[float, int]] = deque()
        self._expected = 0.0
        self._became = 0

    @property
    def ratio(self) -> float:
        """The factor, between a quarter and four, so that a few odd answers cannot move it further."""
        if len(self._recent) < FEWEST:
            return 1.0
        return min(4.0, max(0.25, self._became / self._expected))

    def observe(self, expected: float, became: int) -> None:
        """Record an answer: its expected tokens before this correction, and its actual ones."""
        self._recent.append((expected, became))
        self._expected += expected
        self._became += became
        if len(self._recent) > self._window:
            oldest, had = self._recent.popleft()
            self._expected -= oldest
            self._became -= had


def price_holding(ordered: Sequence[float], hold: float) -> float:
    """The highest price that a share `hold` of future answers can pay, judged by the ascending prices
    `ordered`. Of n + 1 exchangeable values, the k-th smallest of n exceeds the last one with probability k /
    (n + 1) at most. 0, which any answer can pay, where there are too few prices."""
    rank = math.floor((len(ordered) + 1) * (1 - hold) + 1e-9)
    return math.nextafter(ordered[rank - 1], 0.0) if rank else 0.0
