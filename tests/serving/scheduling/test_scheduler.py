"""Continuous batching: tokens are conserved, slots have one owner, clients take turns, everybody ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.errors import ContextLengthExceeded, QueueFull, RequestError
from phasewise.serving.scheduling.request import LiveSequence, Request, SchedulerError
from phasewise.serving.scheduling.scheduler import Scheduler
from phasewise.serving.scheduling.waiting_line import WaitingLine
from tests.support.scheduled import POLICIES, Turns, make, request, turn
from tests.support.tiers import examples


def test_prompts_share_a_batch_up_to_its_tokens_and_a_long_one_is_cut() -> None:
    scheduler = make(tokens=32)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 30))

    first, _ = turn(scheduler)
    assert first is not None
    assert [(len(piece.token_ids), piece.wants_logits) for piece in first.slices] == [(20, True), (12, False)]
    assert list(first.slices[1].token_ids) == list(request("b", 30).prompt_token_ids[:12])

    second, _ = turn(scheduler)
    third, _ = turn(scheduler)
    assert second is not None
    assert third is not None
    assert (second.phase, second.request_ids) == ("decode", ("a",))
    assert (third.phase, third.request_ids) == ("prefill", ("b",))
    assert list(third.slices[0].token_ids) == list(request("b", 30).prompt_token_ids[12:])


@pytest.mark.parametrize("n_steps", [0, 1, 2])
@pytest.mark.parametrize("end", [Scheduler.abort, lambda scheduler, name: scheduler.finish(name, 0)])
def test_an_end_frees_at_once_wherever_the_request_is(
    n_steps: int, end: Callable[[Scheduler, str], object]
) -> None:
    scheduler = make(sequences=1)
    scheduler.add(request("a", 50, 50))
    scheduler.add(request("b"))
    for _ in range(n_steps):
        turn(scheduler)

    end(scheduler, "a")
    scheduler.check()
    assert scheduler.pool.stats().slots_used == 0
    assert not scheduler.abort("a")
    batch, _ = turn(scheduler)
    assert batch is not None
    assert batch.request_ids == ("b",)


def test_a_failed_step_loses_its_own_requests_only() -> None:
    scheduler = make(sequences=2)
    for name in "abc":
        scheduler.add(request(name))
    batch = scheduler.next_batch()
    assert batch is not None

    assert scheduler.discard(batch) == ("a", "b")

    scheduler.check()
    assert scheduler.request_ids() == ("c",)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_oldest_goes_on_and_whoever_came_last_gives_way(policy: str) -> None:
    """Every decode step gives the oldest answer a token, however short of slots the others are."""
    scheduler = make(policy, n_slots=512, context=512, sequences=8)
    turns = Turns(scheduler)
    for name in "abcdefgh":
        scheduler.add(request(name, 60, 300))

    while scheduler.has_work:
        oldest = min(scheduler.request_ids())
        before = turns.got.get(oldest, 0)
        batch = turns.take()
        if batch is not None and batch.phase == "decode" and before:
            assert turns.got[oldest] == before + 1

    assert turns.got == dict.fromkeys("abcdefgh", 300)
    assert list(turns.ended) == sorted(turns.ended)
    if policy in ("paged", "odma"):
        assert scheduler.counts.preemptions > 0


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    scheduler = make(n_slots=48, context=100)

    with pytest.raises(ContextLengthExceeded, match=r"48 tokens here \(the KV cache holds no more\), but 51"):
        scheduler.add(request("a", 41, 10))
    with pytest.raises(ContextLengthExceeded, match="This model's maximum context length is 20 tokens, but"):
        make(context=20).add(request("a", 20, 1))
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(request("a", 0))
    with pytest.raises(RequestError, match="max_tokens"):
        scheduler.add(request("a", 5, 0))
    assert not scheduler.has_work


def test_a_full_queue_refuses_but_what_was_accepted_before() -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(request("a"))

    with pytest.raises(QueueFull):
        scheduler.add(request("b"))
    scheduler.requeue(request("c"))
    assert scheduler.request_ids() == ("a", "c")


def test_misuse_is_told() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    with pytest.raises(SchedulerError, match="here already"):
        scheduler.add(request("a"))
    batch = scheduler.next_batch()
    assert batch is not None

    with pytest.raises(SchedulerError, match="neither committed"):
        scheduler.next_batch()
    with pytest.raises(SchedulerError, match="gave last"):
        scheduler.commit(Batch("decode", ()), [])


CLIENTS = "abcd"
steps = st.lists(st.sampled_from([*CLIENTS, "take", "preempt", "remove"]), max_size=60)


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

    assert [queued.request_id for queued in scheduler._lanes.own.waiting] == ["greedy 2"]
    turns.run()
    assert turns.ended == ["greedy 0", "other", "greedy 1", "greedy 2"]
