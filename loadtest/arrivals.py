"""The times of the requests of a load: arrivals drawn with a seed, taken from a trace, or a closed loop.

Arrivals follow vLLM's benchmark at its burstiness of 1: a Poisson process, scaled so that the last request
comes at n/rate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from phasewise.tuner.config.lengths import RequestLengths, Trace
from phasewise.tuner.config.slo import LatencyBounds, parse_bounds
from phasewise.tuner.errors import TraceError


@dataclass(frozen=True, slots=True)
class RequestPace:
    """The times of requests. Without `rate` and `instants_s` each client waits for its answer first.

    rate: requests/s. instants_s: arrivals of a trace in seconds; `rate` does not apply to them.
    most_at_once: most requests in flight, None for no limit; in a closed loop the number of clients.
    """

    rate: float | None
    instants_s: Sequence[float] | None = None
    most_at_once: int | None = None

    @property
    def is_closed_loop(self) -> bool:
        return self.rate is None and self.instants_s is None

    def arrivals_s(self, count: int, seed: int) -> list[float]:
        """Draw `count` ascending arrival times, in seconds from the start of the load."""
        if self.instants_s is not None:
            return list(self.instants_s)
        if self.rate is None:
            return [0.0] * count
        return poisson_arrivals_s(self.rate, count, random.Random(seed))


def poisson_arrivals_s(rate: float, count: int, rng: random.Random) -> list[float]:
    """Draw ascending arrival times (s) of a Poisson process, scaled so that the last is count / rate."""
    gaps_s = [rng.expovariate(rate) for _ in range(count)]
    instants_s = list(accumulate(gaps_s))
    if not instants_s or instants_s[-1] <= 0:
        return [0.0] * count
    scale = count / rate / instants_s[-1]
    return [instant_s * scale for instant_s in instants_s]


def repeated(trace: Trace, count: int) -> Trace:
    """The first `count` requests by arrival; a shorter trace is repeated from its end.

    Two passes are the mean gap apart, so the rate does not change.
    """
    if not trace:
        raise TraceError("a trace without requests cannot be replayed")
    ordered = sorted(trace, key=lambda request: request.arrival_s or 0.0)
    span_s = ordered[-1].arrival_s or 0.0
    pass_s = span_s * len(ordered) / max(1, len(ordered) - 1)
    return tuple(
        _later(ordered[index % len(ordered)], index // len(ordered) * pass_s) for index in range(count)
    )


def _later(request: RequestLengths, by_s: float) -> RequestLengths:
    return request if request.arrival_s is None else replace(request, arrival_s=request.arrival_s + by_s)


def instants_of(trace: Trace) -> list[float] | None:
    """The arrival times of all requests in seconds; None if any request of the trace has no arrival."""
    instants_s = [request.arrival_s for request in trace if request.arrival_s is not None]
    return instants_s if len(instants_s) == len(trace) else None


def parse_slo(text: str) -> LatencyBounds:
    """Parse bounds of request latencies, in the syntax of `slo.parse_bounds`. Raises TraceError."""
    bounds = parse_bounds(text)
    if any(bound.percentile is not None for bound in bounds):
        raise TraceError(f"this SLO bounds every request, without percentiles: {text!r:.60}")
    return LatencyBounds.of(bounds)
