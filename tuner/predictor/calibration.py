"""Corrections of estimates by the lengths of finished answers, without training anew.

`RunningRatio` keeps the mean of estimates right. `RunningPrice` keeps the share of answers right that
estimates hold: each realised length tells the highest price at which its own forecast would still have had
room for it, and the price to use is one that the wanted share of recent answers could have paid (a running
conformal correction). Forecasts that were too short drive it down, towards room for the request's whole
limit; forecasts that were too long drive it up.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from random import Random

WINDOW = 1024
FEWEST = 64
"""Finished answers before means are corrected."""


class RunningPrice:
    """The price to use now. Not for several threads at once."""

    def __init__(self, trained: Sequence[float], hold: float, window: int = WINDOW) -> None:
        """Begin with the prices that answers of training could pay. hold: the share of answers to hold."""
        self._hold = hold
        self._window = window
        self._recent: deque[float] = deque(_some(trained, window))  # until as many real ones have ended
        self._ordered = sorted(self._recent)

    @property
    def price(self) -> float:
        return price_holding(self._ordered, self._hold)

    def observe(self, price: float) -> None:
        """The highest price at which an answer's forecast had room for it."""
        self._recent.append(price)
        insort(self._ordered, price)
        if len(self._recent) > self._window:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]


def _some(trained: Sequence[float], window: int) -> list[float]:
    """As many of the prices as the window takes, evenly chosen, in an order that has nothing to do with their
    size."""
    ordered = sorted(trained)
    n = min(window, len(ordered))
    evenly = [ordered[(2 * index + 1) * len(ordered) // (2 * n)] for index in range(n)]
    Random(0).shuffle(evenly)
    return evenly


class RunningRatio:
    """The factor for estimated means by which the means of the last answers would have been right.

    Not for several threads at once.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._recent: deque[tuple[float, int]] = deque()
        self._expected = 0.0
        self._became = 0

    @property
    def ratio(self) -> float:
        """The factor, between a quarter and four: the worst that it may follow is a few odd answers."""
        if len(self._recent) < FEWEST:
            return 1.0
        return min(4.0, max(0.25, self._became / self._expected))

    def observe(self, expected: float, became: int) -> None:
        """An answer with this many expected tokens, by a mean not multiplied yet, and what it
        had."""
        self._recent.append((expected, became))
        self._expected += expected
        self._became += became
        if len(self._recent) > self._window:
            oldest, had = self._recent.popleft()
            self._expected -= oldest
            self._became -= had


def price_holding(ordered: Sequence[float], hold: float) -> float:
    """The highest price that a share `hold` of answers to come can pay, judged by `ordered`, ascending.

    Of n + 1 exchangeable values, the k-th smallest of n exceeds the last one with probability k / (n + 1) at
    most. 0, which any answer can pay, where there are too few to tell.
    """
    rank = math.floor((len(ordered) + 1) * (1 - hold) + 1e-9)
    return math.nextafter(ordered[rank - 1], 0.0) if rank else 0.0
