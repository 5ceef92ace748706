"""Continuous batching: tokens are conserved, slots have one owner, the first to come is the first to run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.blocks import BlockPool
from phasewise.serving.errors import ContextLengthExceeded, QueueFull, RequestError
from phasewise.serving.request import Request, TokenOut
from phasewise.serving.scheduler import Scheduler, SchedulerError, SchedulerLimits

STOP = 7


def make(n_slots: int = 1000, context: int = 500, tokens: int = 32, sequences: int = 4) -> Scheduler:
    return Scheduler(BlockPool(n_slots), SchedulerLimits(context, tokens, sequences))


def request(name: str, n_prompt: int = 5, max_tokens: int = 3, stop: int | None = None) -> Request:
    stops = frozenset() if stop is None else frozenset({stop})
    return Request(name, tuple(range(100, 100 + n_prompt)), max_tokens, stops)


def turn(scheduler: Scheduler, token_id: int = 1) -> tuple[Batch | None, list[TokenOut]]:
    batch = scheduler.next_batch()
    outs = [] if batch is None else scheduler.commit(batch, [token_id] * batch.n_logits)
    scheduler.check()
    return batch, outs


@given(
    asked=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20)), min_size=1, max_size=12),
    n_slots=st.integers(110, 400),
    max_batch_tokens=st.integers(1, 64),
    max_sequences=st.integers(1, 5),
)
def test_every_token_is_computed_once_in_place_and_every_request_ends(
    asked: list[tuple[int, int]], n_slots: int, max_batch_tokens: int, max_sequences: int
) -> None:
    scheduler = make(n_slots, 110, max_batch_tokens, max_sequences)
    for index, (n_prompt, max_tokens) in enumerate(asked):
        scheduler.add(request(str(index), n_prompt, max_tokens))
    computed: dict[str, int] = {}
    got: dict[str, int] = {}

    for _ in range(5000):
        batch, outs = turn(scheduler)
        if batch is None:
            break
        assert batch.n_tokens <= max(max_batch_tokens, max_sequences)
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            assert piece.start == computed.get(name, 0)
            computed[name] = piece.start + len(piece.token_ids)
        for out in outs:
            assert out.index == got.get(out.request_id, 0)
            got[out.request_id] = out.index + 1

    assert not scheduler.has_work
    assert scheduler.pool.n_free == n_slots
    assert got == {str(index): max_tokens for index, (_, max_tokens) in enumerate(asked)}
    # The token sampled last is never computed: nothing follows it.
    assert computed == {str(index): sum(both) - 1 for index, both in enumerate(asked)}


def test_prompts_share_a_batch_up_to_its_tokens_and_a_long_one_is_cut() -> None:
    scheduler = make(tokens=32)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 30))

    first, _ = turn(scheduler)
    assert first is not None
    assert [(len(piece.token_ids), piece.wants_logits) for piece in first.slices] == [(20, True), (12, False)]
    assert list(first.slices[1].token_ids) == list(range(100, 112))

    second, _ = turn(scheduler)
    third, _ = turn(scheduler)
    assert second is not None
    assert third is not None
    assert (second.phase, second.request_ids) == ("decode", ("a",))
    assert (third.phase, third.request_ids) == ("prefill", ("b",))
    assert list(third.slices[0].token_ids) == list(range(112, 130))


def test_running_answers_get_a_token_between_two_chunks_of_a_prompt() -> None:
    scheduler = make(tokens=10)
    scheduler.add(request("a", 5, 100))
    turn(scheduler)
    scheduler.add(request("b", 35, 5))

    phases = [batch.phase for batch, _ in (turn(scheduler) for _ in range(8)) if batch is not None]

    assert phases == ["decode", "prefill"] * 4


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler = make(n_slots=100, context=100)
    scheduler.add(request("a", 50, 10))
    scheduler.add(request("big", 50, 10))
    scheduler.add(request("small", 5, 5))

    turn(scheduler)

    assert scheduler.n_running == 1
    assert scheduler.n_waiting == 2


def test_a_stop_token_ends_a_request_in_its_step_and_frees_it() -> None:
    scheduler = make()
    scheduler.add(request("a", 5, 50, stop=STOP))

    _, first = turn(scheduler)
    _, second = turn(scheduler, STOP)

    assert [out.finish_reason for out in first + second] == [None, "stop"]
    assert scheduler.pool.n_used == 0
    assert scheduler.next_batch() is None


@pytest.mark.parametrize("n_steps", [0, 1, 2])
def test_an_abort_frees_at_once_wherever_the_request_is(n_steps: int) -> None:
    scheduler = make(sequences=1)
    scheduler.add(request("a", 50, 50))
    scheduler.add(request("b"))
    for _ in range(n_steps):
        turn(scheduler)

    assert scheduler.abort("a")
    scheduler.check()
    assert scheduler.pool.n_used == 0
    assert not scheduler.abort("a")
    batch, _ = turn(scheduler)
    assert batch is not None
    assert batch.request_ids == ("b",)


def test_a_request_aborted_during_its_step_is_passed_over() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.add(request(name))
    batch = scheduler.next_batch()
    assert batch is not None

    scheduler.abort("b")
    outs = scheduler.commit(batch, [1, 2, 3])

    assert [(out.request_id, out.token_id) for out in outs] == [("a", 1), ("c", 3)]


def test_a_failed_step_loses_its_own_requests_only() -> None:
    scheduler = make(sequences=2)
    for name in "abc":
        scheduler.add(request(name))
    batch = scheduler.next_batch()
    assert batch is not None

    assert scheduler.discard(batch) == ("a", "b")

    scheduler.check()
    assert scheduler.request_ids() == ("c",)


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    scheduler = make(n_slots=50, context=100)

    with pytest.raises(ContextLengthExceeded, match="KV cache holds 50 tokens, but 51 are asked"):
        scheduler.add(request("a", 41, 10))
    with pytest.raises(ContextLengthExceeded, match="model's context holds 20"):
        make(context=20).add(request("a", 20, 1))
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(request("a", 0))
    with pytest.raises(RequestError, match="max_tokens"):
        scheduler.add(request("a", 5, 0))
    assert not scheduler.has_work


def test_a_full_queue_refuses() -> None:
    scheduler = Scheduler(BlockPool(100), SchedulerLimits(100, max_waiting=1))
    scheduler.add(request("a"))

    with pytest.raises(QueueFull):
        scheduler.add(request("b"))


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
