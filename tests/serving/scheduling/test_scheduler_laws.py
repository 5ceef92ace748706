"""Whatever comes in whatever order: what holds for the scheduler under every pool policy."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import KV_CHUNK, Batch, KvCopy
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.pools.contract import Demand, Estimate, Placement, PoolSettings, Rings
from phasewise.serving.pools.opening import open_pool
from phasewise.serving.pools.pool import Beside, KvPool
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.request import MOST_PREEMPTIONS, Request, SchedulerLimits
from phasewise.serving.scheduling.scheduler import Scheduler
from tests.support.restless_pool import RestlessPool
from tests.support.scheduled import POLICIES, Turns, any_pool, make
from tests.support.servers.fake_engine import END, AttentiveRanks, make_engine, run_all, text_of
from tests.support.tiers import examples

CONTEXT = 320
N_SLOTS = 384  # three pages; the longest request fits, and little beside it

lengths = st.tuples(st.integers(1, 150), st.integers(1, 150))  # prompt, answer
shared = st.tuples(st.integers(0, 2), st.integers(0, 100))  # a common beginning, and how much of it
estimates = st.none() | st.builds(Estimate, st.floats(1, 200), st.floats(0, 1))
asked = st.lists(st.tuples(lengths, shared, estimates), min_size=1, max_size=8)


CLIENTS = st.sampled_from(["a", "ab", "abc", "aaab"])
"""Whose request each is, in turn."""


def requests_of(
    asked: list[tuple[tuple[int, int], tuple[int, int], Estimate | None]], clients: str = "a"
) -> list[Request]:
    requests = []
    for index, ((n_prompt, n_answer), (group, n_shared), estimate) in enumerate(asked):
        ids = np.arange(n_prompt) * 7 % 250
        ids[n_shared:] += index
        prompt = tuple(int(token_id) for token_id in (ids + group) % END)
        client = clients[index % len(clients)]
        requests.append(Request(str(index), prompt, n_answer, estimate=estimate, client=client))
    return requests


def submit(request: Request) -> Submit:
    ids, most = request.prompt_token_ids, request.max_tokens
    return Submit(
        request.request_id,
        ids,
        most,
        GREEDY,
        ignore_eos=True,
        estimate=request.estimate,
        client=request.client,
    )


def attentive_engine(**options: object) -> Engine:
    ranks = AttentiveRanks(successor=lambda token_id: token_id)
    sizes = {"kv_slots": N_SLOTS, "context_length": CONTEXT} | options
    return make_engine(ranks, **sizes)  # type: ignore[arg-type]


def alone(request: Request) -> list[int]:
    """The tokens that the request gets when it is the only one, computed whole and without a scheduler."""
    ranks = AttentiveRanks()
    seen = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        seen.append(ranks.choose_by(np.array(seen)))
    return seen[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("policy", POLICIES)
@examples(40)
@given(asked=asked, data=st.data())
def test_answers_under_load_are_those_of_the_request_alone(
    policy: str, asked: list[tuple[tuple[int, int], tuple[int, int], Estimate | None]], data: st.DataObject
) -> None:
    """Chunks, company, growth, migration, preemption for room or for another client's share, reuse, turns at
    decode steps and aborts change no token of anybody else."""
    reuse = data.draw(st.booleans(), label="reuse")
    engine = attentive_engine(
        pool=any_pool(policy, N_SLOTS, CONTEXT),
        max_sequences=data.draw(st.integers(1, 8)),
        prefix_reuse=reuse,
    )
    requests = requests_of(asked, data.draw(CLIENTS, label="clients"))
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    arriving, aborted = list(requests), set()
    chunk = data.draw(st.integers(1, 64), label="chunk")
    rows = data.draw(st.none() | st.integers(1, 8), label="rows")
    step = 0
    engine._pace = lambda: (chunk if step % 7 else 0, rows)  # type: ignore[method-assign]

    for step in range(20_000):
        if arriving and (step % 3 == 0 or not engine.has_work):
            engine.submit(submit(arriving.pop(0)))
        if step % 40 == 39 and engine.has_work and data.draw(st.booleans(), label="abort"):
            victim = data.draw(st.sampled_from(engine.scheduler.request_ids()))
            engine.abort(victim)
            aborted.add(victim)
        if not engine.has_work and not arriving:
            break
        for out in engine.step().outs:
            assert isinstance(out, Answer), out
            got[out.request_id] += [token.token_id for token in out.tokens]
        engine.scheduler.check()
        engine.scheduler.pool.refresh()

    assert not engine.has_work
    assert engine.scheduler.pool.stats().slots_used == 0
    for request in requests:
        expected = alone(request)
        answer = got[request.request_id]
        assert answer == (expected[: len(answer)] if request.request_id in aborted else expected)


class NotedPlacements(Beside):
    """Keeps the placements that a pool has given, and lets none reach beyond its slots."""

    def __init__(self, pool: KvPool, rings: Rings | None, states: StatePlaces | None) -> None:
        super().__init__(rings, states)
        self.rings, self.states, self.pool = rings, states, pool.beside(rings, states)
        pool._beside = self
        self.given: dict[Placement, frozenset[int]] = {}
        """All there ever were, each with its slots."""
        self.to_copy: set[Placement] = set()
        """Those that requests have had since copies were carried out last."""

    def carry_out(self, copies: Iterable[KvCopy]) -> None:
        """Each goes from one placement to another."""
        for source, target, n_slots in copies:
            states = self.states
            if states is not None and source >= states.first_slot:
                assert n_slots == 1
                assert source - states.first_slot < states.n_places
                assert target - states.first_slot in {placement.state for placement in self.to_copy}
                continue
            sources, targets = ({*range(first, first + n_slots)} for first in (source, target))
            assert any(sources <= slots for slots in self.given.values()), (source, n_slots)
            assert any(targets <= self.given[placement] for placement in self.to_copy), (target, n_slots)
        self.to_copy = set(self.pool.placements().values())

    def dressed(self, owner: str, placement: Placement) -> Placement:
        placement = super().dressed(owner, placement)
        if placement not in self.given:
            length = placement.n_slots if placement.table is None else KV_CHUNK
            blocks = [(first, length) for first in placement.table or (placement.base,)]
            assert all(0 <= first <= self.pool.n_slots - length for first, length in blocks), placement
            if placement.ring is not None and self.rings is not None:
                begin, end = placement.ring[0], sum(placement.ring)
                assert self.rings.first_slot <= begin < end <= self.rings.first_slot + self.rings.n_slots
                blocks.append(placement.ring)
            assert self.states is None or placement.state in range(self.states.n_places)
            self.given[placement] = frozenset(
                slot for first, length in blocks for slot in range(first, first + length)
            )
        self.to_copy.add(placement)
        return placement


def noted_pool(policy: str, beside: str, lessons: Iterable[int]) -> NotedPlacements:
    """A small pool that learns soon. lessons: lengths of answers that it has seen. beside: what its
    placements have beside slots."""
    settings = PoolSettings(longest_request=N_SLOTS, refresh_every=2, window=32)
    pool = RestlessPool(N_SLOTS) if policy == "restless" else open_pool(policy, N_SLOTS, settings)
    for n_answer in lessons:
        assert pool.reserve("lesson", Demand(1 + n_answer, 1 + n_answer, 1)) is not None
        pool.release("lesson", n_answer)
    pool.refresh()
    rings = Rings(N_SLOTS, 3 * KV_CHUNK, KV_CHUNK, 60) if beside == "rings" else None
    return NotedPlacements(pool, rings, StatePlaces(5, N_SLOTS) if beside == "states" else None)


class DrawnTraffic:
    """Requests for a scheduler: new ones, conversations that go on, several choices of one prompt."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.ended: list[tuple[int, ...]] = [()]

    def arrive(self) -> None:
        rng = self.rng
        begin = rng.choice(self.ended)[: rng.randrange(N_SLOTS - 100)]
        prompt = (*begin, *rng.choices(range(1, 4), k=rng.choice([1, 3, 20, 90])))
        room = N_SLOTS - len(prompt)
        most = min(room, rng.choice([1, 20, 90, N_SLOTS]))  # up to the last slot, as without max_tokens
        for _ in range(rng.choice([1, 1, 3])):
            name = str(len(self.tokens))
            request = Request(
                name,
                prompt,
                most,
                frozenset({0}),
                estimate=rng.choice([None, Estimate(rng.randrange(1, 200), rng.random())]),
                cache_space=rng.choice(["", "", "other"]),
                client=rng.choice("ab"),
                in_shadow=rng.random() < 0.2,
                takes_over=rng.random() < 0.9,
                turns=tuple(sorted(rng.sample(range(len(prompt)), min(2, len(prompt))))),
            )
            self.tokens[name] = prompt
            self.scheduler.add(request)

    def drafted(self, batch: Batch) -> Batch:
        rooms = self.scheduler.draft_rooms(batch)
        drafts = [[1] * self.rng.randint(0, max(0, min(4, room.most))) for room in rooms]
        return self.scheduler.extend(batch, drafts)

    def commit(self, batch: Batch) -> None:
        rng, runs = self.rng, []
        for piece in batch.slices:
            if piece.wants_logits:
                n_right = rng.randint(0, piece.n_drafted)
                runs.append((*[1] * n_right, rng.randrange(40)))
        for out in self.scheduler.commit_runs(batch, runs):
            self.tokens[out.request_id] += (out.token_id,)
            if out.finish_reason is not None:
                self.ended.append(self.tokens[out.request_id])

    def abort(self) -> None:
        names = self.scheduler.request_ids()
        if names:
            self.scheduler.abort(self.rng.choice(names))


@pytest.mark.parametrize("beside", ["nothing", "rings", "states"])
@pytest.mark.parametrize("policy", POLICIES)
@examples(15)
@given(
    lessons=st.lists(st.integers(1, 200), max_size=24),
    sequences=st.integers(1, 8),
    seed=st.integers(0, 1 << 32),
)
def test_copies_lie_within_placements_and_placements_within_the_pool(
    policy: str, beside: str, lessons: list[int], sequences: int, seed: int
) -> None:
    """Whatever arrives, ends, is aborted between its placement and its copies or drafted, and whenever bounds
    are learnt."""
    rng, noted = random.Random(seed), noted_pool(policy, beside, lessons)
    pool = noted.pool
    scheduler = Scheduler(pool, SchedulerLimits(N_SLOTS, max_batch_tokens=64, max_sequences=sequences))
    traffic = DrawnTraffic(scheduler, rng)
    for _ in range(120):
        if rng.random() < 0.3:
            traffic.arrive()
        batch = scheduler.next_batch(rng.choice([None, 0, 7, 33]), rng.choice([None, None, 2]))
        if rng.random() < 0.1:
            traffic.abort()
        if rng.random() < 0.3:
            pool.refresh()
        noted.carry_out(scheduler.take_copies() if batch is None else batch.copies)
        if batch is None:
            continue
        if batch.phase == "decode" and rng.random() < 0.5:
            batch = traffic.drafted(batch)
        placed = pool.placements()
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            if name in placed:
                assert (piece.table or piece.slot_base) == (placed[name].table or placed[name].base)
                assert piece.start + len(piece.token_ids) <= placed[name].n_slots
        if rng.random() < 0.03:
            scheduler.discard(batch)
        else:
            traffic.commit(batch)
        if rng.random() < 0.01:
            scheduler.clear()
        scheduler.check()


class HalfDone(AttentiveRanks):
    """Ranks that fail at one copy, when some of its step's copies were made."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(successor=lambda token_id: token_id)
        self.copies_left = fails_at

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        self.copies_left -= 1
        if self.copies_left == 0:
            raise ValueError("no such slots")
        super().copy_kv(source_slot, target_slot, n_slots)


@examples(60)
@given(
    asked=asked,
    fails_at=st.integers(1, 12),
    policy=st.sampled_from(POLICIES),
    reuse=st.booleans(),
    clients=CLIENTS,
)
def test_who_was_to_be_moved_by_a_step_that_failed_is_computed_again(
    asked: list[tuple[tuple[int, int], tuple[int, int], Estimate | None]],
    fails_at: int,
    policy: str,
    reuse: bool,
    clients: str,
) -> None:
    """Requests outside the failed batch end with the answers that they get alone."""
    pool = any_pool(policy, N_SLOTS, CONTEXT)
    engine = make_engine(
        HalfDone(fails_at), pool=pool, kv_slots=N_SLOTS, context_length=CONTEXT, prefix_reuse=reuse
    )
    requests = requests_of(asked, clients)
    for request in requests:
        engine.submit(submit(request))
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    failed = set()

    while engine.has_work:
        for out in engine.step().outs:
            if isinstance(out, Answer):
                got[out.request_id] += [token.token_id for token in out.tokens]
            else:
                failed.add(out.request_id)
        engine.scheduler.check()

    for request in requests:
        if request.request_id not in failed:
            assert got[request.request_id] == alone(request)


@pytest.mark.parametrize("policy", POLICIES)
@examples(40)
@given(asked=asked, chunk=st.integers(1, 64), sequences=st.integers(1, 8))
def test_everybody_ends_within_a_bound_that_the_work_before_gives(
    policy: str,
    asked: list[tuple[tuple[int, int], tuple[int, int], Estimate | None]],
    chunk: int,
    sequences: int,
) -> None:
    """No starvation. Every step computes something; no request is preempted more often than is allowed."""
    scheduler = make(policy, n_slots=N_SLOTS, context=CONTEXT, sequences=sequences)
    turns = Turns(scheduler)
    requests = requests_of(asked)
    for request in requests:
        scheduler.add(request)
    preempted: dict[str, int] = {}

    while scheduler.has_work:
        oldest = min(map(int, scheduler.request_ids()))
        running = [sequence.request_id for sequence in scheduler._lanes.running]
        assert turns.take(chunk) is not None
        assert not running or str(oldest) in running or int(running[0]) > oldest
        for waiter in scheduler._lanes.own.waiting:
            preempted[waiter.request_id] = waiter.n_preempted

    assert turns.got == {request.request_id: request.max_tokens for request in requests}
    assert all(times <= MOST_PREEMPTIONS + 1 for times in preempted.values())
    # A token is computed at most once for each time that its request is placed; a step computes one at least.
    work = sum(request.most_tokens for request in requests)
    assert turns.n_steps <= (MOST_PREEMPTIONS + 2) * work


def naive_steps(requests: list[Request]) -> int:
    """One request after the other, its prompt in one step: what no scheduler may be slower than."""
    return sum(request.max_tokens for request in requests)


@examples(60)
@given(asked=asked, policy=st.sampled_from(POLICIES))
def test_company_never_takes_more_steps_than_one_after_the_other(
    asked: list[tuple[tuple[int, int], tuple[int, int], Estimate | None]], policy: str
) -> None:
    """Batching is never slower than a queue where slots are no concern."""
    scheduler = make(policy, n_slots=8 * CONTEXT, context=CONTEXT, tokens=2048, sequences=8)
    turns = Turns(scheduler)
    requests = requests_of(asked)
    for request in requests:
        scheduler.add(request)

    turns.run()

    if not scheduler.counts.preemptions:
        assert turns.n_steps <= naive_steps(requests)


def test_equal_prompts_are_computed_once() -> None:
    """`n` choices: the first computes the prompt, the others wait for it and copy."""
    engine = attentive_engine(max_batch_tokens=32, max_sequences=4, kv_slots=4096)
    prompt = tuple(range(100))
    asked = [Request(str(index), prompt, 10) for index in range(4)]

    outs = run_all(engine, *map(submit, asked))

    ranks = engine.ranks
    assert isinstance(ranks, AttentiveRanks)
    computed = sum(batch.n_tokens for batch in ranks.batches if batch.phase == "prefill")
    assert computed == 100 + 3 * 4
    assert engine.scheduler.counts.prefix_hits == 3
    assert engine.scheduler.counts.prefix_tokens_reused == 3 * 96
    assert len({text_of(pieces) for pieces in outs.values()}) == 1


def test_a_conversation_goes_on_where_it_ended() -> None:
    """The next prompt holds the last answer; none of it is computed again while its slots are untouched."""
    engine = attentive_engine(kv_slots=4096, max_batch_tokens=512)
    first = Request("1", tuple(range(50)), 30)
    run_all(engine, submit(first))
    second = Request("2", (*first.prompt_token_ids, *alone(first), 1, 2, 3), 5)

    outs = run_all(engine, submit(second))["2"]

    assert engine.scheduler.counts.prefix_tokens_reused == 64  # of 79 computed: whole panels
    assert [token.token_id for out in outs if isinstance(out, Answer) for token in out.tokens] == alone(
        second
    )
