"""Scheduling policies for one client's own requests that wait: which of them is admitted next. Pure.

A policy is a function and a row of WAITING_ORDERS. It chooses among requests that were never admitted; turns
between clients, preemption and who gives way are the same under all (docs/recipes.md adds one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phasewise.serving.scheduling.request import LiveSequence

WaitingOrder = Callable[[Sequence[LiveSequence]], LiveSequence]
"""(the requests of one client, in the order of arrival; never empty) -> the one that is next."""

MOST_OVERTAKEN = 16
"""Requests of its client that came later and may be admitted before a request."""


def first_come(requests: Sequence[LiveSequence]) -> LiveSequence:
    """First come, first served."""
    return requests[0]


def shortest_first(requests: Sequence[LiveSequence]) -> LiveSequence:
    """Shortest predicted answer first, with a bounded wait: a request that was overtaken MOST_OVERTAKEN times
    is next. An answer without a prediction counts as long as it may become.
    """
    oldest = requests[0]
    if oldest.n_overtaken >= MOST_OVERTAKEN:
        return oldest
    return min(requests, key=_predicted_tokens)


def _predicted_tokens(sequence: LiveSequence) -> float:
    request = sequence.request
    return request.max_tokens if request.estimate is None else request.estimate.output_tokens


ARRIVAL = "arrival"
WAITING_ORDERS: dict[str, WaitingOrder] = {ARRIVAL: first_come, "shortest": shortest_first}
"""By the name that users give."""
