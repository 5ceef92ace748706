"""The highest rate at which a server keeps its promises: bracketing by a factor, then bisection.

Pure: a generator that asks for a rate and is sent whether it was kept. It knows no clock and no server.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

MOST_RATE, LEAST_RATE = 1e5, 1e-3


@dataclass(frozen=True, slots=True)
class RateSearch:
    """How to look: where to begin, by what factor to go on, and how near is near enough."""

    start: float = 1.0
    factor: float = 2.0
    resolution: float = 0.05
    """The answer is at most this share below a rate that was missed."""
    most_probes: int = 16
    least_share: float = 1 / 64
    """Of `start`: whoever keeps no promise there is not asked for less."""


def find_rate(search: RateSearch) -> Generator[float, bool, float | None]:
    """Ask for rates; return the highest that was kept, None where none was.

    On a landscape that falls once from kept to missed, the answer is within `resolution` of the edge, unless
    `most_probes` end the search first. On any landscape it is a rate that was kept when it was asked for.
    """
    kept: float | None = None
    missed: float | None = None
    rate = min(max(search.start, LEAST_RATE), MOST_RATE)
    for _ in range(search.most_probes):
        if (yield rate):
            kept = rate
        else:
            missed = rate
        following = _next(kept, missed, search)
        if following is None:
            break
        rate = following
    return kept


def _next(kept: float | None, missed: float | None, search: RateSearch) -> float | None:
    """Up until one is missed, down until one is kept, then between; None: near enough, or out of range."""
    if missed is None:
        assert kept is not None
        return None if kept >= MOST_RATE else min(kept * search.factor, MOST_RATE)
    if kept is None:
        least = max(LEAST_RATE, search.start * search.least_share)
        return None if missed <= least else max(missed / search.factor, least)
    return None if kept >= missed * (1 - search.resolution) else math.sqrt(kept * missed)
