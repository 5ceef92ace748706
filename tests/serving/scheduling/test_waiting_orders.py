"""Policies for one client's waiting requests: the next one, and how long another may wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.pools.contract import Estimate
from phasewise.serving.scheduling.request import LiveSequence, Request
from phasewise.serving.scheduling.waiting_line import (
    MOST_OVERTAKEN,
    WAITING_ORDERS,
    WaitingLine,
    shortest_first,
)
from tests.support.tiers import examples


def waiting(name: str, tokens: float | None, client: str = "") -> LiveSequence:
    estimate = None if tokens is None else Estimate(tokens, 0.0)
    return LiveSequence(Request(name, (1,), 50, estimate=estimate, client=client))


def taken(line: WaitingLine) -> LiveSequence:
    sequence = next(line.heads)
    line.take(sequence)
    return sequence


def test_the_shortest_prediction_is_next_and_of_equals_the_oldest() -> None:
    """An answer without a prediction counts as its limit, which is 50."""
    line = WaitingLine(shortest_first)
    for name, tokens in (("a", 60.0), ("b", None), ("c", 7.0), ("d", 7.0), ("e", 50.0)):
        line.join(waiting(name, tokens))

    assert "".join(taken(line).request_id for _ in range(5)) == "cdbea"


@examples(60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["take", "join"]), st.integers(1, 99)), max_size=150),
    order=st.sampled_from(sorted(WAITING_ORDERS)),
)
def test_every_policy_gives_each_request_once_after_a_bounded_wait(
    steps: list[tuple[str, int]], order: str
) -> None:
    """Of those that came later at most MOST_OVERTAKEN are admitted before a request."""
    line, arrivals, admitted = WaitingLine(WAITING_ORDERS[order]), [], []
    for step, tokens in [*steps, *[("take", 0)] * len(steps)]:
        if step == "join":
            arrivals.append(waiting(str(len(arrivals)), tokens))
            line.join(arrivals[-1])
        elif len(line):
            admitted.append(taken(line))

    assert sorted(admitted, key=arrivals.index) == arrivals
    for place, sequence in enumerate(admitted):
        later = [
            earlier for earlier in admitted[:place] if arrivals.index(earlier) > arrivals.index(sequence)
        ]
        assert len(later) == sequence.n_overtaken <= MOST_OVERTAKEN


@pytest.mark.parametrize("order", WAITING_ORDERS)
def test_no_policy_reaches_beyond_one_client(order: str) -> None:
    """Another client's short requests do not come before a long one in its turn."""
    line = WaitingLine(WAITING_ORDERS[order])
    long_one = waiting("long", 90.0, "a")
    line.join(long_one)
    for number in range(3):
        line.join(replace(waiting(str(number), 1.0), request=Request(str(number), (1,), 1, client="b")))

    assert taken(line) is long_one
    assert long_one.n_overtaken == 0
