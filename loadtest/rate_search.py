"""The search for the highest rate at which a server keeps its SLO: bracketing by a factor, then bisection.

Pure: a generator yields a rate and is sent whether the SLO was kept there. It knows no clock and no server.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

MOST_RATE, LEAST_RATE = 1e5, 1e-3


@dataclass(frozen=True, slots=True)
class RateSearch:
    """Parameters of a search. Rates are requests/s."""

    start: float = 1.0
    factor: float = 2.0
    resolution: float = 0.05
    """The search ends when the best kept rate is at most this share below a missed one."""
    most_probes: int = 16
    least_share: float = 1 / 64
    """The lowest rate to try, as a share of `start`."""
    votes: int = 1
    """At the end, the rates on both sides are probed again until the majority of this many probes is certain.
    If a verdict changes, the search goes on."""


def find_rate(search: RateSearch) -> Generator[float, bool, float | None]:
    """Yield rates to probe; return the highest kept rate, None if none was kept.

    If rates are kept up to an edge and missed above it, the result is within `resolution` of the edge, unless
    `most_probes` ends the search first. In any case most probes of the result were kept.
    """
    by_rate: dict[float, list[bool]] = {}
    rate: float | None = min(max(search.start, LEAST_RATE), MOST_RATE)
    for _ in range(search.most_probes):
        if rate is None:
            break
        by_rate.setdefault(rate, []).append((yield rate))
        rate = _next(by_rate, search)
    return _edges(by_rate)[0]


def _edges(by_rate: Mapping[float, Sequence[bool]]) -> tuple[float | None, float | None]:
    """The highest kept rate below the lowest missed one, and the lowest missed rate; each may be None."""
    kept = {rate for rate, verdicts in by_rate.items() if 2 * sum(verdicts) > len(verdicts)}
    missed = min(by_rate.keys() - kept, default=None)
    return max((rate for rate in kept if missed is None or rate < missed), default=None), missed


def _next(by_rate: Mapping[float, Sequence[bool]], search: RateSearch) -> float | None:
    """The next rate: up until one is missed, down until one is kept, then between; None: the search ends."""
    kept, missed = _edges(by_rate)
    if missed is None:
        assert kept is not None
        following = None if kept >= MOST_RATE else min(kept * search.factor, MOST_RATE)
    elif kept is None:
        least = max(LEAST_RATE, search.start * search.least_share)
        following = None if missed <= least else max(missed / search.factor, least)
    else:
        near = kept >= missed * (1 - search.resolution)
        following = None if near else math.sqrt(kept * missed)
    return _doubted(by_rate, (missed, kept), search.votes) if following is None else following


def _doubted(
    by_rate: Mapping[float, Sequence[bool]], edges: Sequence[float | None], votes: int
) -> float | None:
    """The first of the edges whose verdict further probes, up to `votes` in all, could change."""
    for rate in edges:
        if rate is not None:
            n_kept, n_missed = sum(by_rate[rate]), len(by_rate[rate]) - sum(by_rate[rate])
            if 2 * max(n_kept, n_missed) <= votes:
                return rate
    return None
