"""Clients take turns: whatever one of them sends, the others wait for its next request alone."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.scheduling.request import LiveSequence, Request
from phasewise.serving.scheduling.waiting_line import (
    MOST_OVERTAKEN,
    WAITING_ORDERS,
    WaitingLine,
    shortest_first,
)
from tests.serving.scheduling.test_scheduler_laws import CONTEXT, N_SLOTS, asked, requests_of
from tests.support.scheduled import POLICIES, Turns, make, request
from tests.support.tiers import examples

CLIENTS = "abcd"
steps = st.lists(st.sampled_from([*CLIENTS, "take", "preempt", "remove"]), max_size=60)


class FirstCome(WaitingLine):
    """The reference for one client: a list in order of arrival, preempted requests at their old places."""

    def __init__(self) -> None:
        self._arrivals: dict[LiveSequence, int] = {}
        self._list: list[LiveSequence] = []

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._list)

    @property
    def clients(self) -> set[str]:
        return {queued.request.client for queued in self._list}

    @property
    def heads(self) -> Iterator[LiveSequence]:
        return iter(self._list[:1])

    def is_behind_older(self, sequence: LiveSequence) -> bool:
        return any(queued.admission is not None and queued.age < sequence.age for queued in self._list)

    def join(self, sequence: LiveSequence) -> None:
        self._arrivals[sequence] = len(self._arrivals)
        self._list.append(sequence)

    def rejoin(self, sequence: LiveSequence) -> None:
        insort(self._list, sequence, key=self._arrivals.__getitem__)

    def take(self, sequence: LiveSequence) -> None:
        self._list.remove(sequence)

    def remove(self, sequence: LiveSequence) -> None:
        self._list.remove(sequence)


def sequence(client: str, name: int) -> LiveSequence:
    return LiveSequence(Request(str(name), (1,), 1, client=client))


@examples(300)
@given(steps=steps, data=st.data())
def test_turns_keep_their_laws_whatever_comes_and_goes(steps: list[str], data: st.DataObject) -> None:
    """Conservation; order of arrival within a client; a wait bounded by clients; preempted ones by age."""
    line = WaitingLine()
    waiting: dict[int, LiveSequence] = {}
    bounds: dict[int, int] = {}  # requests never admitted that may still be admitted before
    admitted: list[LiveSequence] = []

    for name, step in enumerate(steps):
        if step in CLIENTS:
            new = waiting[name] = sequence(step, name)
            n_own = sum(queued.request.client == step and queued.admission is None for queued in line)
            bounds[name] = n_own + (n_own + 1) * (len(CLIENTS) - 1)
            line.join(new)
        elif step == "take" and waiting:
            taken = next(line.heads)
            line.take(taken)
            preempted = [other for other in waiting.values() if other.admission is not None]
            if preempted:
                assert taken.admission == min(other.admission or 0 for other in preempted)
            else:
                own = [
                    number
                    for number, other in waiting.items()
                    if other.request.client == taken.request.client
                ]
                assert int(taken.request_id) == min(own)
                taken.admission = name
                for waiting_name, other in waiting.items():
                    if other is not taken:
                        bounds[waiting_name] -= 1
                        assert bounds[waiting_name] >= 0
            del waiting[int(taken.request_id)]
            admitted.append(taken)
        elif step == "preempt" and admitted:
            returning = admitted.pop(data.draw(st.integers(0, len(admitted) - 1)))
            waiting[int(returning.request_id)] = returning
            line.rejoin(returning)
        elif step == "remove" and waiting:
            removed = data.draw(st.sampled_from(sorted(waiting)))
            line.remove(waiting.pop(removed))
        assert len(line) == len(waiting)
        assert set(line) == set(waiting.values())
        assert line.n_clients == len(
            {queued.request.client for queued in waiting.values() if queued.admission is None}
        )
        heads = list(line.heads)
        owners = [queued.request.client for queued in line]
        assert [head.request.client for head in heads] == list(dict.fromkeys(owners))
        assert set(heads) <= set(line)
        assert line.clients == {head.request.client for head in heads}


def test_who_does_not_wait_cannot_be_removed() -> None:
    line = WaitingLine()
    with pytest.raises(ValueError, match="does not wait"):
        line.remove(sequence("a", 1))


@pytest.mark.parametrize("policy", POLICIES)
@examples(30)
@given(asked=asked, chunk=st.integers(1, 64), sequences=st.integers(1, 4), data=st.data())
def test_one_client_alone_is_first_come_first_served(
    policy: str, asked: list[tuple[object, ...]], chunk: int, sequences: int, data: st.DataObject
) -> None:
    """Batch for batch, with preemptions and aborts, what a list in order of arrival gives."""
    requests = requests_of(asked)  # type: ignore[arg-type]
    at_once = data.draw(st.integers(0, len(requests)), label="at once")
    aborts = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 7), max_size=3), label="aborts")
    assert batches_of(policy, requests, chunk, sequences, at_once, aborts, WaitingLine()) == batches_of(
        policy, requests, chunk, sequences, at_once, aborts, FirstCome()
    )


def batches_of(
    policy: str,
    requests: list[Request],
    chunk: int,
    sequences: int,
    at_once: int,
    aborts: dict[int, int],
    line: WaitingLine,
) -> list[Batch]:
    scheduler = make(policy, n_slots=N_SLOTS, context=CONTEXT, sequences=sequences)
    scheduler._waiting = scheduler._admitter._waiting = line
    turns, batches, arriving = Turns(scheduler), [], list(requests)
    while arriving and at_once:
        scheduler.add(arriving.pop(0))
        at_once -= 1
    for step in range(10_000):
        if arriving and (step % 3 == 0 or not scheduler.has_work):
            scheduler.add(arriving.pop(0))
        if step in aborts:
            scheduler.abort(str(aborts[step]))
        batch = turns.take(chunk)
        if batch is not None:
            batches.append(batch)
        elif not scheduler.has_work and not arriving:
            return batches
    raise AssertionError("10,000 steps do not end it")


@pytest.mark.parametrize("policy", POLICIES)
@examples(30)
@given(asked=asked, clients=st.text(CLIENTS, min_size=8, max_size=8), sequences=st.integers(1, 4))
def test_requests_of_several_clients_all_end_whole(
    policy: str, asked: list[tuple[object, ...]], clients: str, sequences: int
) -> None:
    scheduler = make(policy, n_slots=N_SLOTS, context=CONTEXT, sequences=sequences)
    turns = Turns(scheduler)
    requests = requests_of(asked)  # type: ignore[arg-type]
    for each_request, client in zip(requests, clients, strict=False):
        scheduler.add(replace(each_request, client=client))

    turns.run()

    assert turns.got == {each_request.request_id: each_request.max_tokens for each_request in requests}


def test_a_backlog_of_one_client_costs_another_one_turn() -> None:
    scheduler = make(sequences=2)
    for index in range(40):
        scheduler.add(replace(request(f"greedy {index}"), client="greedy"))
    turns = Turns(scheduler)
    turns.take()
    scheduler.add(replace(request("other"), client="other"))
    assert (scheduler.n_clients_waiting, scheduler.n_waiting) == (2, 39)

    turns.run()

    ended = turns.ended.index("other")
    assert ended <= 4
    assert Counter(turns.ended)["other"] == 1
    greedy = [name for name in turns.ended if name != "other"]
    assert greedy == [f"greedy {index}" for index in range(40)]


def test_age_is_counted_from_the_first_admission() -> None:
    """A request that had its turn is not preempted for one that came before it and had its turn later."""
    scheduler = make("paged", n_slots=384, context=384, sequences=3)
    scheduler.add(replace(request("greedy 0", 300, 1), client="greedy"))
    for index in (1, 2):
        scheduler.add(replace(request(f"greedy {index}", 5, 150), client="greedy"))
    turns = Turns(scheduler)
    turns.take()
    scheduler.add(replace(request("other", 5, 123), client="other"))

    while not scheduler.counts.preemptions:
        assert turns.take() is not None

    assert [queued.request_id for queued in scheduler._waiting] == ["greedy 2"]
    turns.run()
    assert turns.ended == ["greedy 0", "other", "greedy 1", "greedy 2"]


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
