"""No request of one client starves another's; chunks keep the promise of a time per token."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.engine.messages import Answer, Progress, Submit
from phasewise.serving.scheduling.admission import LEAST_TOKENS
from phasewise.serving.scheduling.pacing import PROMPT_SHARE, Pacing
from phasewise.serving.scheduling.request import LiveSequence, Request
from phasewise.serving.scheduling.scheduler import Scheduler
from tests.support.scheduled import POLICIES, Turns, make
from tests.support.servers.fake_engine import AttentiveRanks, make_engine
from tests.support.tiers import examples, n_examples

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


MS = 1_000_000


def seen(promise_ms: float, decode_ms: float, token_ms: float, most_tokens: int = 2048) -> Pacing:
    """After a few steps on a machine of constant pace."""
    pacing = Pacing(int(promise_ms * MS), most_tokens)
    for _ in range(5):
        pacing.observe("prefill", 100, int(100 * token_ms * MS))
        pacing.observe("decode", 8, int(decode_ms * MS))
    return pacing


def chunk(pacing: Pacing, n_answering: int = 8) -> int:
    """Tokens of the next chunk, once the answers have had their decode steps."""
    while (tokens := pacing.pace(n_answering).chunk_tokens) == 0:
        pacing.observe("decode", n_answering, max(1, int(pacing._decode_ns)))
    return tokens


@given(
    promise_ms=st.floats(1, 1000),
    decode_ms=st.floats(0.1, 1000),
    token_ms=st.floats(0.01, 10),
    most_tokens=st.integers(16, 4096),
)
def test_a_chunk_and_a_decode_step_fit_into_the_promise_where_it_can_be_kept(
    promise_ms: float, decode_ms: float, token_ms: float, most_tokens: int
) -> None:
    """Chunks have `PROMPT_SHARE` of the time where a decode step takes more than half of the promise."""
    pacing = seen(promise_ms, decode_ms, token_ms, most_tokens)
    tokens = chunk(pacing)

    assert 1 <= tokens <= most_tokens
    left_ms = promise_ms - decode_ms
    if left_ms >= decode_ms * 1.001 and left_ms >= 16.001 * token_ms:
        assert tokens * token_ms + decode_ms <= promise_ms * 1.001
    elif left_ms < decode_ms * 0.999:
        fair_ms = decode_ms * PROMPT_SHARE / (1 - PROMPT_SHARE)
        assert (tokens + 1) * token_ms >= fair_ms * 0.999 or tokens == most_tokens
    assert pacing.is_kept == (decode_ms <= promise_ms)


@given(
    decode_ms=st.floats(60, 1000),
    fixed_ms=st.floats(0, 500),
    token_ms=st.floats(0.01, 10),
    rows=st.integers(1, 32),
)
def test_where_the_promise_cannot_be_kept_prompts_have_their_share_of_the_time(
    decode_ms: float, fixed_ms: float, token_ms: float, rows: int
) -> None:
    """However long a chunk takes, and however little of that its tokens are: prompts get their share within a
    decode step and a chunk, and the answers get the rest."""
    assume(512 * token_ms >= 3 * decode_ms)  # a chunk can take as long as its share
    pacing = Pacing(100 * MS, 2048)
    pacing.observe("prefill", 512, int((fixed_ms + 512 * token_ms) * MS))
    pacing.observe("decode", rows, int(decode_ms * MS))
    times = {"prefill": 0.0, "decode": 0.0}
    longest_ms, last = 0.0, "decode"
    for _ in range(400):
        tokens = pacing.pace(rows).chunk_tokens
        if last == "prefill" or tokens == 0:
            last, took_ms, n_tokens = "decode", decode_ms, rows
        else:
            last, took_ms, n_tokens = "prefill", fixed_ms + tokens * token_ms, tokens
            longest_ms = max(longest_ms, took_ms)
        pacing.observe("prefill" if last == "prefill" else "decode", n_tokens, int(took_ms * MS))
        times[last] += took_ms

    whole_ms = sum(times.values())
    slack_ms = 2 * (longest_ms + decode_ms)
    assert times["prefill"] <= (PROMPT_SHARE + 0.1) * whole_ms + slack_ms
    assert times["prefill"] >= 0.5 * whole_ms - slack_ms


@pytest.mark.parametrize(("fixed_ms", "token_ms"), [(0, 3), (60, 3), (200, 1)])
def test_a_chunk_computes_prompts_nearly_as_fast_as_larger_ones(fixed_ms: float, token_ms: float) -> None:
    """A step of few tokens may take nearly as long as one of many: a crumb would waste it."""
    pacing = Pacing(100 * MS, 2048)
    pacing.observe("prefill", 512, int((fixed_ms + 512 * token_ms) * MS))
    for _ in range(60):
        pacing.observe("decode", 8, 131 * MS)
        tokens = chunk(pacing)
        pacing.observe("prefill", tokens, int((fixed_ms + tokens * token_ms) * MS))

    cost_ms = fixed_ms / tokens + token_ms
    assert cost_ms <= 1.2 * (fixed_ms / 512 + token_ms)


@given(times=st.lists(st.floats(1, 1000), min_size=32, max_size=32), n_answering=st.integers(2, 32))
def test_as_many_rows_as_give_most_tokens_a_second(times: list[float], n_answering: int) -> None:
    """The number is all answers, a power of two or a middle between two, whatever steps take."""
    pacing = Pacing(100 * MS, 2048)
    pacing.observe("prefill", 100, 100 * MS)
    for _ in range(40):
        rows = pacing.pace(n_answering).rows or n_answering
        assert 1 <= rows <= n_answering
        pacing.observe("decode", rows, int(times[rows - 1] * MS))

    tried = {1, 2, 3, 4, 6, 8, 12, 16, 24, n_answering}
    rates = {rows: rows / times[rows - 1] for rows in tried if rows <= n_answering}
    chosen = pacing.pace(n_answering).rows or n_answering
    assert rates[chosen] * 1.051 >= max(rates.values())


@pytest.mark.parametrize("fixed_ms", [0, 5, 30])
def test_steps_with_a_fixed_cost_end_at_the_promise(fixed_ms: int) -> None:
    """Time is not proportional to tokens; the chunk still settles where chunk and decode step fill it."""
    pacing = Pacing(100 * MS, 2048)
    pacing.observe("decode", 8, 20 * MS)
    took_ms = 0.0
    for _ in range(60):
        tokens = chunk(pacing)
        took_ms = fixed_ms + 0.5 * tokens
        pacing.observe("prefill", tokens, int(took_ms * MS))

    assert 70 <= took_ms <= 85


@given(
    promise_ms=st.floats(10, 500),
    decode_ms=st.floats(0.1, 600),
    token_ms=st.floats(0.01, 5),
    n_answering=st.integers(1, 64),
)
def test_answers_slow_a_prompt_down_and_never_below_their_share(
    promise_ms: float, decode_ms: float, token_ms: float, n_answering: int
) -> None:
    pacing = seen(promise_ms, decode_ms, token_ms)
    alone = pacing.prompt_token_ns(0)
    beside = pacing.prompt_token_ns(n_answering)
    assert alone == pytest.approx(token_ms * MS, rel=1e-3)
    assert alone <= beside <= 2 * alone
    if not pacing.is_kept:
        assert beside == pytest.approx(alone / PROMPT_SHARE)
    assert Pacing(1, 16).prompt_token_ns(n_answering) == 0


@pytest.mark.parametrize("seed", range(n_examples(40)))
def test_every_prompt_is_told_to_its_end_in_growing_steps(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(AttentiveRanks(), context_length=400, kv_slots=1600, max_sequences=3)
    prompts = {str(number): rng.randrange(1, 300) for number in range(8)}
    shared = tuple(rng.randrange(250) for _ in range(300))
    told: dict[str, list[Progress]] = {name: [] for name in prompts}
    begun: set[str] = set()
    left: set[str] = set()
    for name, n_tokens in prompts.items():
        engine.submit(Submit(name, shared[:n_tokens], 3))
    while engine.has_work:
        delivery = engine.step()
        for progress in delivery.progress:
            assert progress.request_id not in begun | left
            told[progress.request_id].append(progress)
        begun |= {out.request_id for out in delivery.outs if isinstance(out, Answer)}
        if rng.random() < 0.05 and engine.has_work:
            aborted = rng.choice(sorted(prompts))
            left.add(aborted)
            engine.abort(aborted)
    for name, steps in told.items():
        computed = [step.n_computed for step in steps]
        assert computed == sorted(set(computed))
        assert all(step.n_cached < step.n_computed <= step.n_prompt == prompts[name] for step in steps)
        assert len({step.n_cached for step in steps}) <= 1
        if name in begun:
            assert computed[-1] == prompts[name]
    assert not engine._progress._prompts
