"""Requests divided between two schedulers: one computes prompts, the other answers. No block is lost, none
has two owners, and every token of an answer comes once, whatever the order of events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch, KvCopy
from phasewise.serving.pools.contract import Demand, Placement
from phasewise.serving.scheduling.request import Request, SchedulerError, SchedulerLimits
from phasewise.serving.scheduling.scheduler import Scheduler
from tests.serving.scheduling.test_scheduler_laws import CLIENTS
from tests.support.scheduled import POLICIES, any_pool, make, request, turn
from tests.support.tiers import examples


def prefill_only(name: str, n_prompt: int = 5) -> Request:
    whole = request(name, n_prompt, 1)
    return Request(name, whole.prompt_token_ids, 1, prefill_only=True)


def test_a_computed_prompt_is_held_until_it_is_acknowledged() -> None:
    """No token is made of it, nothing more is computed, and its slots stay taken."""
    scheduler = make()
    scheduler.add(prefill_only("a"))

    batch, outs = turn(scheduler)

    assert batch is not None
    assert batch.slices[0].wants_logits
    assert outs == []
    assert turn(scheduler) == (None, [])
    assert scheduler.hand_over("a") == scheduler.pool.placements()["a"]
    assert scheduler.abort("a")
    assert not scheduler.has_work
    assert scheduler.pool.stats().slots_used == 0
    assert not scheduler.abort("a")


def test_an_expected_request_has_a_block_and_does_not_run() -> None:
    scheduler = make()
    scheduler.expect(request("a", 5, 3))

    assert turn(scheduler) == (None, [])
    assert list(scheduler.expected) == ["a"]
    out = scheduler.arrived("a", 7)

    assert out is not None
    assert (out.token_id, out.n_generated, out.finish_reason) == (7, 1, None)
    assert scheduler.expected == {}
    batch, _ = turn(scheduler)
    assert batch is not None
    assert batch.phase == "decode"
    assert [(piece.token_ids, piece.start) for piece in batch.slices] == [((7,), 5)]


def test_an_answer_of_one_token_ends_when_it_arrives() -> None:
    scheduler = make()
    scheduler.expect(request("a", 5, 1))
    turn(scheduler)

    out = scheduler.arrived("a", 7)

    assert out is not None
    assert out.finish_reason == "length"
    assert not scheduler.has_work


def test_arrivals_of_what_is_gone_or_was_never_expected() -> None:
    scheduler = make(n_slots=512)
    scheduler.add(request("here"))
    scheduler.expect(request("gone"))
    scheduler.abort("gone")

    assert scheduler.arrived("gone", 1) is None
    with pytest.raises(SchedulerError, match="not expected"):
        scheduler.arrived("here", 1)
    turn(scheduler)
    with pytest.raises(SchedulerError, match="answered here"):
        scheduler.hand_over("here")
    assert scheduler.hand_over("gone") is None


def test_what_has_arrived_is_a_prefix_for_others() -> None:
    """A prompt that begins like one that came from elsewhere copies what it has."""
    scheduler = make(context=500, tokens=64)
    first = request("a", 40, 2)
    scheduler.expect(first)
    turn(scheduler)
    scheduler.arrived("a", 1)

    scheduler.add(Request("b", (*first.prompt_token_ids, 5), 2))
    turn(scheduler)

    assert scheduler.counts.prefix_tokens_reused == 32


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_blocks_stay_and_the_oldest_waits_for_them(policy: str) -> None:
    """The oldest answer pauses where pinned blocks alone could make room; the pool does not break."""
    scheduler = Scheduler(any_pool(policy, 384, 384), SchedulerLimits(384, 128, 8, prefix_reuse=False))
    scheduler.add(request("old", 100, 150))
    turn(scheduler)
    scheduler.expect(request("new", 250, 2))
    where = None
    for _ in range(200):
        turn(scheduler)
        if "new" in scheduler.expected:
            where = where or scheduler.expected["new"]
            assert scheduler.pool.placements()["new"] == where
    if where is None:  # the pool kept room for the old one instead
        assert scheduler.n_waiting in (0, 1)
        return
    scheduler.arrived("new", 1)
    for _ in range(400):
        turn(scheduler)
    assert not scheduler.has_work


def test_a_pinned_block_is_not_squeezed() -> None:
    """A pool that would move a block to make room for another leaves a pinned one where it is."""
    pool = any_pool("odma", 480, 400)
    for owner, n_tokens in (("a", 160), ("b", 16), ("c", 160)):
        assert pool.reserve(owner, Demand(n_tokens, n_tokens, n_tokens)) is not None
    pool.pin("b")
    before = pool.placements()["b"]
    pool.release("a")
    pool.release("c")

    grant = pool.reserve("d", Demand(384, 384, 384))

    assert pool.placements()["b"] == before
    assert grant is None or all(move.owner != "b" for move in grant.moves)
    pool.check()
    if grant is None:
        pool.unpin("b")
        assert pool.reserve("d", Demand(384, 384, 384)) is not None


lengths = st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=10)


@pytest.mark.parametrize("policy", POLICIES)
@examples(60)
@given(asked=lengths, mixed=st.booleans(), clients=CLIENTS, data=st.data())
def test_blocks_in_flight_are_conserved(
    policy: str, asked: list[tuple[int, int]], mixed: bool, clients: str, data: st.DataObject
) -> None:
    """Prompts on one scheduler, answers on the other (and, mixed, the other way round too): after every event
    each pool keeps its law, what is in flight is held on both sides, and every answer comes whole.

    As a front and its instances do it: the other side expects a request once its prompt has begun; one whose
    prompt has given its block away when the other side has one runs there as a whole."""
    sides = [
        Scheduler(any_pool(policy, 384, 320), SchedulerLimits(320, 64, data.draw(st.integers(1, 6))))
        for _ in range(2)
    ]
    requests = [
        Request(
            str(index),
            tuple(range(1000 * index, 1000 * index + n_prompt)),
            n_answer,
            client=clients[index % len(clients)],
        )
        for index, (n_prompt, n_answer) in enumerate(asked)
    ]
    source = {request.request_id: index % 2 if mixed else 0 for index, request in enumerate(requests)}
    got = {request.request_id: 0 for request in requests}
    begun: set[str] = set()
    aimed: set[str] = set()
    computed: set[str] = set()
    ended: set[str] = set()
    arriving = list(requests)

    for step in range(20_000):
        if len(ended) == len(requests):
            break
        if arriving and (step % 5 == 0):
            request = arriving.pop(0)
            sides[source[request.request_id]].add(replace(request, max_tokens=1, prefill_only=True))
        for index, side in enumerate(sides):
            batch = side.next_batch(data.draw(st.integers(1, 64)) if step < 20 else None)
            if batch is None:
                side.take_copies()
            else:
                for name, piece in zip(batch.request_ids, batch.slices, strict=True):
                    if source[name] != index:
                        continue
                    if name not in begun:
                        begun.add(name)
                        sides[1 - index].expect(requests[int(name)])
                    computed.discard(name)
                    if piece.wants_logits:
                        computed.add(name)
                for out in side.commit(batch, [1] * batch.n_logits):
                    got[out.request_id] += 1
                    assert got[out.request_id] == out.n_generated
                    if out.finish_reason is not None:
                        ended.add(out.request_id)
            side.check()
        for index, side in enumerate(sides):
            for name in side.expected.keys() - aimed:
                if sides[1 - index].hand_over(name) is not None:
                    aimed.add(name)
                elif step % 2:
                    sides[1 - index].abort(name)
                    side.abort(name)
                    source[name] = -1
                    side.add(requests[int(name)])
        for name in sorted(aimed & computed):
            assert name in sides[0].pool.placements()
            assert name in sides[1].pool.placements()
            if step % 3 == int(name) % 3:
                out = sides[1 - source[name]].arrived(name, 1)
                assert out is not None
                got[name] += 1
                if out.finish_reason is not None:
                    ended.add(name)
                assert sides[source[name]].abort(name)
                aimed.discard(name)
                computed.discard(name)

    assert len(ended) == len(requests), "requests wait for each other"
    assert got == {request.request_id: request.max_tokens for request in requests}
    for side in sides:
        assert side.pool.stats().slots_used == 0


class Slots:
    """The content of each slot, as the batches, copies and hand-overs that are told write it."""

    def __init__(self, n_slots: int) -> None:
        self._held: list[int | None] = [None] * n_slots

    def compute(self, batch: Batch, tokens: Mapping[str, Sequence[int]]) -> None:
        """Do a batch, after looking at what its tokens attend to. tokens: each request's, from the first."""
        self.copy(batch.copies)
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            where = Placement(piece.slot_base, 0, piece.table)
            before = [self._held[where.slot(position)] for position in range(piece.start)]
            assert before == list(tokens[name][: piece.start]), f"{name} reads what others have written"
            self.write(where, piece.start, piece.token_ids)

    def copy(self, copies: Iterable[KvCopy]) -> None:
        for source, target, n_slots in copies:
            self._held[target : target + n_slots] = self._held[source : source + n_slots]

    def write(self, where: Placement, begin: int, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids, begin):
            self._held[where.slot(position)] = token_id


@pytest.mark.parametrize("policy", POLICIES)
@examples(100)
@given(data=st.data())
def test_no_request_reads_a_block_that_a_hand_over_was_writing(policy: str, data: st.DataObject) -> None:
    """Prompts that come again, computed here or handed over, some of them given up half-way: whatever a
    request attends to is of its own tokens."""
    scheduler = Scheduler(any_pool(policy, 384, 192), SchedulerLimits(192, 64, 4))
    slots = Slots(scheduler.pool.n_slots)
    tokens: dict[str, list[int]] = {}
    for name in map(str, range(data.draw(st.integers(2, 12)))):
        of, n_prompt = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 100)))
        request = Request(
            name, tuple(1000 * of + position for position in range(n_prompt)), data.draw(st.integers(1, 30))
        )
        tokens[name] = list(request.prompt_token_ids)
        is_expected = data.draw(st.booleans())
        (scheduler.expect if is_expected else scheduler.add)(request)
        for _ in range(data.draw(st.integers(1, 6))):
            batch = scheduler.next_batch(data.draw(st.integers(1, 64)))
            if batch is None:
                slots.copy(scheduler.take_copies())
            else:
                slots.compute(batch, tokens)
                for out in scheduler.commit(batch, range(batch.n_logits)):
                    tokens[out.request_id].append(out.token_id)
            scheduler.check()
            for other, where in list(scheduler.expected.items()):
                what = data.draw(st.sampled_from(["nothing", "half", "all", "gives up"]))
                if what == "nothing":
                    continue
                came = tokens[other][: None if what == "all" else len(tokens[other]) // 2]
                slots.write(where, 0, came)
                if what == "all":
                    scheduler.arrived(other, 7)
                    tokens[other].append(7)
                elif what == "gives up":
                    scheduler.abort(other)
