"""States of sequences: every step goes on from what its tokens left, whatever was kept, evicted or
refused."""

from __future__ import annotations

import random

import pytest

from phasewise.serving.batch import Batch, KvCopy
from phasewise.serving.pools.contract import PoolSettings
from phasewise.serving.pools.opening import POLICIES, open_pool
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.scheduling.request import Request, SchedulerLimits
from phasewise.serving.scheduling.scheduler import Scheduler
from tests.support.tiers import n_examples

SLOTS, STOP = 512, 0


class Memory:
    """The contents: of a slot the tokens up to its own, of a place those that its state is
    after."""

    def __init__(self, n_slots: int, n_places: int) -> None:
        self.slots: list[tuple[int, ...] | None] = [None] * (n_slots + n_places)

    def copy(self, copy: KvCopy) -> None:
        source, target, n = copy
        self.slots[target : target + n] = self.slots[source : source + n]

    def run(self, batch: Batch, tokens_of: dict[str, tuple[int, ...]]) -> None:
        """Compute a step, whose slices read what their sequences must have left."""
        for copy in batch.copies:
            self.copy(copy)
        for piece, name in zip(batch.slices, batch.request_ids, strict=True):
            before = tokens_of[name][: piece.start]
            tokens = (*before, *piece.token_ids)
            place = SLOTS + piece.state
            assert piece.start == 0 or self.slots[place] == before, (name, piece)
            for position in range(len(tokens)):
                slot = (
                    piece.slot_base + position
                    if piece.table is None
                    else piece.table[position // 128] + position % 128
                )
                if position < piece.start:
                    assert self.slots[slot] == tokens[: position + 1], (name, position)
                self.slots[slot] = tokens[: position + 1]
            self.slots[place] = tokens
            for position, keep in piece.keeps:
                assert piece.start < position <= len(tokens)
                self.slots[SLOTS + keep] = tokens[:position]


def scheduler_of(n_places: int, policy: str = "odma", reuse: bool = True, sequences: int = 6) -> Scheduler:
    pool = open_pool(policy, SLOTS, PoolSettings(longest_request=SLOTS))
    limits = SchedulerLimits(SLOTS, max_batch_tokens=64, max_sequences=sequences, prefix_reuse=reuse)
    return Scheduler(pool.beside(states=StatePlaces(n_places, SLOTS)), limits)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_places", [1, 2, 5, 12])
def test_drawn_requests_go_on_from_their_own_tokens(policy: str, n_places: int) -> None:
    rng = random.Random(f"{policy}{n_places}")
    for _ in range(n_examples(8)):
        _run_drawn(rng, scheduler_of(n_places, policy, reuse=rng.random() < 0.85), n_places)


def _run_drawn(rng: random.Random, scheduler: Scheduler, n_places: int) -> None:
    memory, tokens_of, spoken = Memory(SLOTS, n_places), {}, [()]
    for turn in range(60):
        for _ in range(rng.randrange(3)):
            begin = rng.choice(spoken)[: rng.choice([5, 40, 300])]
            prompt = (*begin, *(rng.randrange(1, 5) for _ in range(rng.choice([1, 3, 20, 60]))))
            if len(prompt) + 30 < SLOTS:
                name = f"{turn}.{rng.random()}"
                scheduler.add(Request(name, prompt, rng.randrange(1, 30), frozenset({STOP})))
                tokens_of[name] = prompt
        if rng.random() < 0.1 and scheduler.request_ids():
            scheduler.abort(rng.choice(scheduler.request_ids()))
        batch = scheduler.next_batch(rng.choice([None, 7, 33]), rng.choice([None, 2]))
        if batch is None:
            for copy in scheduler.take_copies():
                memory.copy(copy)
            continue
        if batch.phase == "decode" and rng.random() < 0.6:
            rooms = scheduler.draft_rooms(batch)
            drafts = [
                [rng.randrange(1, 5) for _ in range(rng.randint(0, max(0, min(4, room.most))))]
                for room in rooms
            ]
            batch = scheduler.extend(batch, drafts)
        memory.run(batch, tokens_of)
        if rng.random() < 0.05:
            scheduler.discard(batch)
            scheduler.check()
            continue
        runs = []
        for piece in batch.slices:
            if not piece.wants_logits:
                continue
            right = rng.randint(0, piece.n_drafted)
            run = (*piece.token_ids[len(piece.token_ids) - piece.n_drafted :][:right], rng.randrange(0, 5))
            runs.append(run)
        for out in scheduler.commit_runs(batch, runs):
            tokens_of[out.request_id] += (out.token_id,)
            if out.finish_reason is not None:
                spoken.append(tokens_of[out.request_id])
        scheduler.check()


@pytest.mark.parametrize("policy", ["odma", "paged"])
@pytest.mark.parametrize("finished", [0, 3])
def test_conversations_find_what_they_left_while_the_pool_has_room(policy: str, finished: int) -> None:
    """Requests state no limit, so that any of them could fill the context: what was never used is taken
    first, whoever could grow into it. finished: conversations that came before and are longest ago."""
    context, slots, answer = 1024, 4096, 8
    pool = open_pool(policy, slots, PoolSettings(longest_request=context))
    limits = SchedulerLimits(context, max_batch_tokens=64, max_sequences=6)
    scheduler = Scheduler(pool.beside(states=StatePlaces(64, slots)), limits)
    said: dict[int, tuple[int, ...]] = dict.fromkeys(range(6 + finished), ())
    for turn in range(3):
        for talk in said if turn == 0 else list(said)[finished:]:
            new = tuple(100 * talk + 10 * turn + token for token in range(20))
            prompt, n_computed = (*said[talk], *new), 0
            request = Request(f"{talk} {turn}", prompt, context - len(prompt), frozenset({STOP}))
            scheduler.add(request)
            while (batch := scheduler.next_batch()) is not None:
                n_computed += batch.n_tokens
                token = STOP if scheduler.n_computed(request.request_id) >= len(prompt) + answer - 1 else 7
                scheduler.commit(batch, [token for piece in batch.slices if piece.wants_logits])
                scheduler.check()
            expected = len(new) + answer + (1 if said[talk] else 0)
            assert n_computed == expected, (talk, turn)
            said[talk] = (*prompt, *[7] * answer, STOP)


def test_a_client_does_not_find_the_states_of_another_space() -> None:
    scheduler, memory = scheduler_of(8), Memory(SLOTS, 8)
    prompt = tuple(range(1, 101))
    for space in ("a", "b", "b"):
        name = f"{space}{scheduler.counts.prefix_hits}"
        scheduler.add(Request(name, prompt, 1, cache_space=space))
        while (batch := scheduler.next_batch()) is not None:
            memory.run(batch, {name: prompt})
            scheduler.commit(batch, [7 for piece in batch.slices if piece.wants_logits])

    assert (scheduler.counts.prefix_hits, scheduler.counts.prefix_tokens_reused) == (1, 99)


class Talk:
    """A conversation by tokens. shape: whose thoughts a prompt has: those after the last question, that of
    the last answer, or none."""

    GENERATION = (1, 2, 3)
    """The opening of an answer: two tokens that old answers have before them too, and one of thoughts."""

    def __init__(self, shape: str, first: int) -> None:
        self.shape = shape
        self.turns: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._next = first

    def _fresh(self, n_tokens: int) -> tuple[int, ...]:
        self._next += n_tokens
        return tuple(range(self._next - n_tokens, self._next))

    def ask(self, role: str, n_tokens: int) -> None:
        self.turns.append((role, (), self._fresh(n_tokens)))

    def prompt(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens, and where the turns begin that `Request.turns` names."""
        roles = [role for role, _, _ in self.turns]
        last_question = max(index for index, role in enumerate(roles) if role == "user")
        answers = [index for index, role in enumerate(roles) if role == "assistant"]
        tokens: list[int] = []
        starts = []
        for index, (role, thought, said) in enumerate(self.turns):
            if role == "assistant":
                starts.append(len(tokens))
                has_thought = (self.shape == "question" and index > last_question) or (
                    self.shape == "answer" and index == answers[-1]
                )
                tokens += (*self.GENERATION, *thought, 4) if has_thought else self.GENERATION[:2]
            tokens += said
        starts.append(len(tokens))
        n_since = sum(index > last_question for index in answers)
        named = {starts[-back] for back in (1, 2, n_since + 1) if back <= len(starts)}
        return (*tokens, *self.GENERATION), tuple(sorted(named))

    def answer(self, n_thought: int, n_said: int) -> list[int]:
        turn = "assistant", self._fresh(n_thought), (*self._fresh(n_said), 5)
        self.turns.append(turn)
        return [*turn[1], 4, *turn[2]]


def _said(scheduler: Scheduler, talk: Talk, name: str, sizes: tuple[int, int]) -> tuple[int, tuple[int, ...]]:
    """One answer: the tokens of its prompt that were computed, and all its tokens."""
    prompt, turns = talk.prompt()
    answer = talk.answer(*sizes)
    scheduler.add(Request(name, prompt, len(answer), turns=turns))
    n_computed = n_given = 0
    while (batch := scheduler.next_batch()) is not None:
        n_computed += batch.n_tokens if batch.phase == "prefill" else 0
        n_given += batch.n_logits
        scheduler.commit(batch, [answer[n_given - 1]] * batch.n_logits)
    scheduler.check()
    return n_computed, (*prompt, *answer)


@pytest.mark.many
@pytest.mark.parametrize("shape", ["question", "answer", "none"])
@pytest.mark.parametrize(("policy", "n_places", "n_others"), [("odma", 6, 0), ("paged", 40, 1)])
def test_a_long_chain_of_calls_computes_its_new_tokens_alone(
    policy: str, shape: str, n_places: int, n_others: int
) -> None:
    """At 64,000 tokens, whichever old thoughts a template drops, and beside other conversations: what a
    prompt shares with one that was computed before is not computed again, the part of a chunk apart."""
    chunk, context = 512, 90_000
    rng = random.Random(f"{policy}{shape}{n_places}")
    slots = 30 * 98_304
    pool = open_pool(policy, slots, PoolSettings(longest_request=context))
    limits = SchedulerLimits(context, max_batch_tokens=chunk, max_sequences=1)
    scheduler = Scheduler(pool.beside(states=StatePlaces(n_places, slots)), limits)
    talks = [Talk(shape, 10 + 1_000_000 * number) for number in range(1 + n_others)]
    seen: list[list[tuple[int, ...]]] = [[] for _ in talks]
    for talk in talks:
        talk.ask("system", 60_000 if talk is talks[0] else 3_000)
    for question in range(3):
        for number, talk in enumerate(talks):
            talk.ask("user", rng.choice([12, 200, 5_000]))
            for call in range(n_examples(20) if question == 1 else 3):
                prompt, _ = talk.prompt()
                shared = max((_n_shared(prompt, old) for old in seen[number]), default=0)
                name, sizes = f"{number} {question} {call}", (rng.randint(1, 300), rng.randint(1, 80))
                n_computed, whole = _said(scheduler, talk, name, sizes)

                assert n_computed <= len(prompt) - shared + chunk, (name, len(prompt), shared)
                seen[number].append(whole)
                talk.ask("tool", rng.choice([3, 150, 900]))
            talk.answer(100, 100)
    assert len(talks[0].prompt()[0]) > 64_000


def _n_shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(left), len(right)))
