"""Which price of a token makes estimates hold the wanted share of answers, and how it follows what answers become.

Each realised length tells the highest price at which its own forecast would still have had room for it. The price
to use is one that the wanted share of recent answers could have paid: a running conformal correction. Forecasts that
were too short drive it down, towards room for the request's whole limit; forecasts that were too long drive it up.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

WINDOW = 512
FEWEST = 64
"""Answers before the trained prices are left."""


class RunningPrice:
    """The price to use now. Not for several threads at once."""

    def __init__(self, trained: Sequence[float], hold: float, window: int = WINDOW) -> None:
        """trained: the prices that answers of training could pay, ascending. hold: the share to hold."""
        self._hold = hold
        self._trained = price_holding(trained, hold)
        self._window = window
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    @property
    def price(self) -> float:
        if len(self._recent) < FEWEST:
            return self._trained
        return price_holding(self._ordered, self._hold)

    def observe(self, price: float) -> None:
        """The highest price at which an answer's forecast had room for it."""
        self._recent.append(price)
        insort(self._ordered, price)
        if len(self._recent) > self._window:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]


def price_holding(ordered: Sequence[float], hold: float) -> float:
    """The highest price that a share `hold` of answers to come can pay, judged by `ordered`, ascending.

    Of n + 1 exchangeable values, the k-th smallest of n exceeds the last one with probability k / (n + 1) at
    most. 0, which any answer can pay, where there are too few to tell.
    """
    rank = math.floor((len(ordered) + 1) * (1 - hold) + 1e-9)
    return math.nextafter(ordered[rank - 1], 0.0) if rank else 0.0
