"""The last hour of a server's log as arrivals, and the part of it that a measured run has time for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phasewise._words import counted
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.tuner.config.lengths import Trace
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.errors import TraceError
from phasewise.workflows.report import Report

HOUR_S = 3600.0
MOST_REQUESTS = 400
"""Requests of an hour that are rehearsed, the last ones where there are more: each takes some milliseconds of
a simulation."""


@dataclass(frozen=True)
class Hour:
    """Requests in the order of their arrival, the first at 0 s."""

    arrivals: tuple[Arrival, ...]

    @property
    def tells_drafts(self) -> bool:
        """True if the log says which drafts its answers would have accepted."""
        return any(arrival.lookup for arrival in self.arrivals)

    @property
    def span_s(self) -> float:
        return self.arrivals[-1].at_s

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(arrival.prompt_tokens + arrival.output_tokens for arrival in self.arrivals)

    def fitted(self, context_tokens: int) -> Hour:
        """With requests cut to what a model can hold: half of it is an answer's at most, a prompt has what
        is left."""
        if context_tokens < 2:
            raise TraceError(f"a context of {counted(context_tokens, 'token')} holds no request")
        return Hour(tuple(_cut(arrival, context_tokens) for arrival in self.arrivals))


def read_hour(path: str | os.PathLike[str], report: Report) -> Hour:
    """The last hour of a `--length-log`, or of any other trace with arrivals. TraceError, one line."""
    trace = read_trace(path)
    if any(request.arrival_s is None for request in trace):
        raise TraceError(f"{os.fspath(path)} states no arrivals: a server's --length-log has them")
    ordered = sorted(trace, key=lambda request: request.arrival_s or 0.0)
    end_s = ordered[-1].arrival_s or 0.0
    last = [request for request in ordered if (request.arrival_s or 0.0) >= end_s - HOUR_S]
    if len(last) > MOST_REQUESTS:
        report(f"the last {MOST_REQUESTS} of {counted(len(last), 'request')} of the hour are rehearsed")
        last = last[-MOST_REQUESTS:]
    return Hour(_from_first(tuple(last)))


def _cut(arrival: Arrival, context_tokens: int) -> Arrival:
    n_output = min(arrival.output_tokens, max(context_tokens // 2, context_tokens - arrival.prompt_tokens))
    n_prompt = min(arrival.prompt_tokens, context_tokens - n_output)
    lookup = arrival.lookup[: 2 * n_output]
    return arrival._replace(prompt_tokens=n_prompt, output_tokens=n_output, lookup=lookup)


def _from_first(trace: Trace) -> tuple[Arrival, ...]:
    first_s = trace[0].arrival_s or 0.0
    return tuple(
        Arrival(
            index,
            (request.arrival_s or 0.0) - first_s,
            request.prompt_tokens,
            request.output_tokens,
            lookup=request.lookup,
        )
        for index, request in enumerate(trace)
    )


def busiest_part(
    hour: Hour, window_s: float, ends_s: Callable[[Sequence[Arrival]], float]
) -> tuple[Arrival, ...]:
    """The requests of the `window_s` seconds with the most tokens, as many of them as end in that time.

    ends_s: when the last of some requests would end. At least one request.
    """
    arrivals = hour.arrivals
    tokens, last, best, most = 0, 0, (0, 1), -1
    for first, begin in enumerate(arrivals):
        while last < len(arrivals) and arrivals[last].at_s < begin.at_s + window_s:
            tokens += arrivals[last].prompt_tokens + arrivals[last].output_tokens
            last += 1
        if tokens > most:
            best, most = (first, last), tokens
        tokens -= begin.prompt_tokens + begin.output_tokens
    begin_s = arrivals[best[0]].at_s
    part = [
        arrival._replace(request_id=index, at_s=arrival.at_s - begin_s)
        for index, arrival in enumerate(arrivals[slice(*best)])
    ]
    low, high = 1, len(part)
    while low < high:  # the most that end in time
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ends_s(part[:middle]) <= window_s else (low, middle - 1)
    return tuple(part[:low])
