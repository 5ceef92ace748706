"""Co-batching by bucket: one bucket after another, nobody overtaken for ever, every request served."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cobatching import BUCKET, ORDERS, SameBucket, cobatching
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.scheduling.request import LiveSequence, Request
from phasewise.serving.scheduling.waiting_line import MOST_OVERTAKEN, WAITING_ORDERS, WaitingLine
from tests.support.tiers import examples

BOUNDS = (16, 64, 256)


def sequence_of(index: int, length: int | None) -> LiveSequence:
    estimate = None if length is None else Estimate(length, 0.0)
    return LiveSequence(Request(str(index), (1,), 512, estimate=estimate))


@examples(50)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80))
def test_every_request_is_admitted_and_overtaken_by_no_more_than_the_bound(lengths: Sequence[int]) -> None:
    order = SameBucket(BOUNDS)
    line = WaitingLine(order)
    waiting = [sequence_of(index, length) for index, length in enumerate(lengths)]
    for sequence in waiting:
        line.join(sequence)
    admitted = []
    while len(line):
        (head,) = line.heads
        admitted.append(head)
        line.take(head)

    assert sorted(map(id, admitted)) == sorted(map(id, waiting))
    assert max(sequence.n_overtaken for sequence in waiting) <= MOST_OVERTAKEN


def test_one_bucket_is_emptied_before_the_next() -> None:
    order = SameBucket(BOUNDS)
    waiting = [sequence_of(index, length) for index, length in enumerate([5, 100, 6, 200, 300, 7])]
    admitted = []
    while waiting:
        admitted.append(order(waiting))
        waiting.remove(admitted[-1])

    assert [order.bucket_of(sequence) for sequence in admitted] == [0, 0, 0, 2, 2, 3]


def test_a_request_without_an_estimate_counts_as_long_as_it_may_become() -> None:
    order = SameBucket(BOUNDS)
    assert order.bucket_of(sequence_of(0, None)) == len(BOUNDS)


def test_all_orders_serve_a_trace_and_the_order_is_gone_afterwards() -> None:
    said = list(cobatching(["lognormal:40,0.5/60,0.8"], requests=60, slots=1024, policies="odma"))

    rows = [part for part in said if not isinstance(part, str)]
    assert [row["order"] for row in rows] == [*ORDERS] * 3
    assert [row["over arrival"] for row in rows if row["order"] == ORDERS[0]] == [1.0] * 3
    assert str(said[-1]).startswith("by bucket over arrival: ")
    assert BUCKET not in WAITING_ORDERS
