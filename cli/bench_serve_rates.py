"""The highest rate at which a server keeps its promises: bracketing by a factor, then bisection.

Pure: a generator that asks for a rate and is sent whether it was kept. It knows no clock and no server.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
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
    votes: int = 1
    """Where the search would end, the rates on either side are asked for until the majority of so many is
    certain. One that is overturned takes the search on."""


def find_rate(search: RateSearch) -> Generator[float, bool, float | None]:
    """Ask for rates; return the highest that was kept, None where none was.

    On a landscape that falls once from kept to missed, the answer is within `resolution` of the edge, unless
    `most_probes` end the search first. On any landscape it is a rate that was kept more often than not.
    """
    found: dict[float, list[bool]] = {}
    rate: float | None = min(max(search.start, LEAST_RATE), MOST_RATE)
    for _ in range(search.most_probes):
        if rate is None:
            break
        found.setdefault(rate, []).append((yield rate))
        rate = _next(found, search)
    return _edges(found)[0]


def _edges(found: Mapping[float, Sequence[bool]]) -> tuple[float | None, float | None]:
    """The lowest rate that was missed, and the highest kept one below it."""
    kept = {rate for rate, verdicts in found.items() if 2 * sum(verdicts) > len(verdicts)}
    missed = min(found.keys() - kept, default=None)
    return max((rate for rate in kept if missed is None or rate < missed), default=None), missed


def _next(found: Mapping[float, Sequence[bool]], search: RateSearch) -> float | None:
    """Up until one is missed, down until one is kept, then between; None: near enough, or out of range."""
    kept, missed = _edges(found)
    if missed is None:
        assert kept is not None
        following = None if kept >= MOST_RATE else min(kept * search.factor, MOST_RATE)
    elif kept is None:
        least = max(LEAST_RATE, search.start * search.least_share)
        following = None if missed <= least else max(missed / search.factor, least)
    else:
        near = kept >= missed * (1 - search.resolution)
        following = None if near else math.sqrt(kept * missed)
    return _doubted(found, (missed, kept), search.votes) if following is None else following


def _doubted(
    found: Mapping[float, Sequence[bool]], edges: Sequence[float | None], votes: int
) -> float | None:
    """The first of the edges whose verdict so many votes could still overturn."""
    for rate in edges:
        if rate is not None:
            n_kept, n_missed = sum(found[rate]), len(found[rate]) - sum(found[rate])
            if 2 * max(n_kept, n_missed) <= votes:
                return rate
    return None
