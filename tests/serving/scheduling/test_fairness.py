"""No request of one client starves another's, whatever it sends: places, KV slots and prefill are shared."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.scheduling.admission import LEAST_TOKENS
from phasewise.serving.scheduling.request import LiveSequence, Request
from phasewise.serving.scheduling.scheduler import Scheduler
from tests.support.scheduled import POLICIES, Turns, make
from tests.support.tiers import examples

CONTEXT = 400
greedy = st.one_of(
    st.tuples(st.integers(1, 20), st.integers(150, 200)),  # long answers
    st.tuples(st.integers(100, 200), st.integers(1, 3)),  # long prompts
    st.tuples(st.integers(1, 8), st.integers(1, 4)),  # many small
)
loads = st.lists(st.tuples(greedy, st.sampled_from("abc")), min_size=1, max_size=30)
"""Prompt, answer and client of each request, in order of arrival."""


class Shared:
    """A scheduler whose clients keep it busy, with figures of what runs in the step under way."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.turns = Turns(scheduler)
        self._names = count()
        self.clients: dict[str, str] = {}
        self.before: Counter[str] = Counter()
        """Prompt tokens of each client in the steps since `watch`."""

    def add(self, client: str, n_prompt: int, n_answer: int) -> str:
        index = next(self._names)
        name = str(index)
        prompt = tuple(range(1000 * index, 1000 * index + n_prompt))
        self.scheduler.add(Request(name, prompt, n_answer, client=client))
        self.clients[name] = client
        return name

    def step(self, chunk: int | None = None) -> Batch | None:
        batch = self.turns.take(chunk)
        if batch is not None and batch.phase == "prefill":
            for name, piece in zip(batch.request_ids, batch.slices, strict=True):
                self.before[self.clients[name]] += len(piece.token_ids)
        return batch

    def held(self) -> Counter[str]:
        return Counter(sequence.request.client for sequence in self.scheduler._lanes.running)

    def waiting(self) -> set[str]:
        return {sequence.request.client for sequence in self.scheduler._lanes.own.waiting}

    def is_running(self, name: str) -> bool:
        return any(sequence.request_id == name for sequence in self.scheduler._lanes.running)


def check_shares(shared: Shared) -> None:
    """While a client that holds less than its share waits, none holds more than its own."""
    held, waiting = shared.held(), shared.waiting()
    share = max(1, shared.scheduler.limits.max_sequences // max(1, len(waiting | held.keys())))
    assert not any(held[client] < share for client in waiting) or max(held.values()) <= share, (held, waiting)


@examples(100)
@given(load=loads, places=st.integers(1, 12), every=st.integers(1, 4), chunk=st.integers(1, 64))
def test_while_another_client_waits_none_holds_more_places_than_its_share(
    load: list[tuple[tuple[int, int], str]], places: int, every: int, chunk: int
) -> None:
    """After every step's admissions, where slots are no concern; and every request ends whole."""
    shared = Shared(make(n_slots=40 * CONTEXT, context=CONTEXT, tokens=64, sequences=places))
    asked: dict[str, int] = {}
    arriving = list(load)
    for step in range(20_000):
        if arriving and step % every == 0:
            (n_prompt, n_answer), client = arriving.pop(0)
            asked[shared.add(client, n_prompt, n_answer)] = n_answer
        scheduler = shared.scheduler
        scheduler._admitter.admit()  # as the step does first
        check_shares(shared)
        if shared.step(chunk) is None and not arriving:
            break

    assert not shared.scheduler.has_work
    assert shared.turns.got == asked


@pytest.mark.parametrize("policy", POLICIES)
@examples(40)
@given(
    load=loads,
    places=st.integers(1, 8),
    n_slots=st.sampled_from([768, 1536, 40 * CONTEXT]),
    chunk=st.integers(1, 64),
    n_before=st.integers(0, 60),
    small=st.tuples(st.integers(1, 30), st.integers(1, 8)),
)
def test_a_small_client_waits_for_a_part_of_one_step(
    policy: str,
    load: list[tuple[tuple[int, int], str]],
    places: int,
    n_slots: int,
    chunk: int,
    n_before: int,
    small: tuple[int, int],
) -> None:
    """It runs at once, whoever holds the places and the slots. Before its first chunk, each other client gets
    at most one: a step's tokens by the number of clients, or the least part."""
    scheduler = make(policy, n_slots=n_slots, context=CONTEXT, tokens=64, sequences=places)
    shared = Shared(scheduler)
    for (n_prompt, n_answer), client in load:
        shared.add(client, n_prompt, n_answer)
    for _ in range(n_before):
        shared.step(chunk)
    shared.before.clear()
    name = shared.add("small", *small)
    n_clients = len(shared.waiting() | shared.held().keys())
    fits = n_slots == 40 * CONTEXT or (policy == "paged" and n_slots // n_clients >= 256)
    if n_clients > places or not fits:
        return  # its turn at places comes later, or a block of its length may lie nowhere yet

    for _ in range(6 * n_clients):
        batch = shared.step(chunk)
        assert batch is not None
        assert shared.is_running(name) or name in shared.turns.ended
        if name in batch.request_ids:
            break
    else:
        raise AssertionError(f"{name} was not computed")
    others = {client: n for client, n in shared.before.items() if client != "small"}
    assert all(n_tokens <= 2 * max(chunk, LEAST_TOKENS) for n_tokens in others.values()), others
    shared.turns.run()
    assert not scheduler.has_work


def test_a_client_that_comes_back_again_and_again_stops_nobody() -> None:
    """One request after the other, for ever: the oldest answers of the other client go on all the while."""
    shared = Shared(make(n_slots=40 * CONTEXT, context=CONTEXT, tokens=64, sequences=4))
    long = [shared.add("greedy", 50, 200) for _ in range(6)]
    shared.add("small", 5, 2)
    for _ in range(5000):
        if "small" not in shared.held() and "small" not in shared.waiting():
            shared.add("small", 5, 2)
        shared.step()
        if all(name in shared.turns.ended for name in long):
            return
    raise AssertionError(f"{shared.turns.ended} of {long} have ended")


def test_the_oldest_of_a_client_never_gives_way_for_a_share() -> None:
    """So a client of one answer keeps it, whatever part of the slots it has."""
    shared = Shared(make("paged", n_slots=512, context=512, tokens=512, sequences=4))
    shared.add("large", 300, 100)
    shared.step()
    oldest: LiveSequence = shared.scheduler._lanes.running[0]
    for _ in range(6):
        shared.add("small", 100, 20)
    while "large" in shared.held():
        shared.step()
        assert not oldest.n_preempted

    shared.turns.run()


def test_a_request_that_waits_is_not_held_up_by_one_of_another_client_that_must_become_the_oldest() -> None:
    scheduler = make("paged", n_slots=512, context=512, tokens=64, sequences=8)
    shared = Shared(scheduler)
    for _ in range(4):
        shared.add("greedy", 50, 300)
    while not any(waiter.n_preempted for waiter in scheduler._lanes.own.waiting):
        shared.step()
    for sequence in scheduler._lanes.own.waiting:
        sequence.n_preempted = 4
    name = shared.add("small", 5, 3)
    shared.step()

    assert shared.is_running(name)
    shared.turns.run()
