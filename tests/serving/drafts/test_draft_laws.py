"""Drafts change no token: whatever is drafted, accepted, preempted, cut short or aborted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.computed_drafts import ModelDrafter
from phasewise.serving.drafts.contract import Drafter, StepCosts
from phasewise.serving.drafts.lookup import LookupDrafter
from phasewise.serving.engine.messages import Answer, Failure, Submit
from phasewise.serving.errors import RankLost
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from phasewise.serving.scheduling.request import Request, SchedulerError
from tests.serving.scheduling.test_scheduler_laws import (
    CLIENTS,
    CONTEXT,
    N_SLOTS,
    alone,
    attentive_engine,
    requests_of,
    submit,
)
from tests.support.guessing import GuessingDrafter
from tests.support.scheduled import POLICIES, any_pool, make, request
from tests.support.servers.fake_engine import (
    END,
    VOCAB_SIZE,
    AttentiveRanks,
    FakeRanks,
    encode,
    make_engine,
    run_all,
    slots_of,
    text_of,
)
from tests.support.tiers import examples

lengths = st.tuples(st.integers(1, 150), st.integers(1, 150))  # prompt, answer
shared = st.tuples(st.integers(0, 2), st.integers(0, 100))  # a common beginning, and how much of it
asked = st.lists(st.tuples(lengths, shared, st.none()), min_size=1, max_size=8)


def token_ids(outs: list[Answer | Failure]) -> list[int]:
    assert all(isinstance(out, Answer) for out in outs), outs
    return [token.token_id for out in outs if isinstance(out, Answer) for token in out.tokens]


@pytest.mark.parametrize("policy", POLICIES)
@examples(25)
@given(asked=asked, right=st.sampled_from((0.0, 0.5, 0.9, 1.0)), data=st.data())
def test_answers_under_load_are_those_of_the_request_alone(
    policy: str, asked: list[tuple[tuple[int, int], tuple[int, int], None]], right: float, data: st.DataObject
) -> None:
    """Small pools, so that requests grow, move and are preempted; chunks, company, reuse and aborts."""
    requests = requests_of(asked)
    answers = {each_request.request_id: alone(each_request) for each_request in requests}
    engine = attentive_engine(
        pool=any_pool(policy, N_SLOTS, CONTEXT),
        max_sequences=data.draw(st.integers(1, 8)),
        prefix_reuse=data.draw(st.booleans(), label="reuse"),
        drafter=GuessingDrafter(answers, right, END, data.draw(st.integers(0, 99), label="seed")),
    )
    got: dict[str, list[int]] = {name: [] for name in answers}
    arriving, aborted, n_kept = list(requests), set(), 0
    for step in range(10_000):
        if arriving and (step % 3 == 0 or not engine.has_work):
            engine.submit(submit(arriving.pop(0)))
        if step % 30 == 29 and engine.has_work and data.draw(st.booleans(), label="abort"):
            victim = data.draw(st.sampled_from(engine.scheduler.request_ids()))
            engine.abort(victim)
            aborted.add(victim)
        if not engine.has_work and not arriving:
            break
        for out in engine.step().outs:
            assert isinstance(out, Answer), out
            got[out.request_id] += [token.token_id for token in out.tokens]
            assert out.n_generated >= len(got[out.request_id])
            assert out.drafts is not None
            n_kept += 0 if out.finish_reason is None else out.drafts.accepted
        engine.scheduler.check()
        engine.scheduler.pool.refresh()

    assert not engine.has_work
    assert engine.scheduler.pool.stats().slots_used == 0
    for name, expected in answers.items():
        assert got[name] == (expected[: len(got[name])] if name in aborted else expected)
    load = engine.load()
    assert load.drafts is not None
    assert engine.drafting.drafter.n_drafted == sum(load.drafts)  # type: ignore[union-attr]
    assert load.drafts.accepted >= n_kept
    if right == 1.0:
        assert load.drafts.rejected == 0
    assert not engine.drafting.drafter.asked  # type: ignore[union-attr]


ANSWER = "bcdefghijklmnopqrstuvwxyzabcdefgh"


@pytest.mark.parametrize("stop", [("fgh",), ("h",), ("zab", "xyz"), ("nothing",)])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_stop_strings_and_limits_cut_a_run_where_they_would_cut_single_tokens(
    stop: tuple[str, ...], max_tokens: int, right: float
) -> None:
    message = Submit("r", tuple(encode("a")), max_tokens, GREEDY, stop)
    plain = run_all(make_engine(), message)["r"]
    drafter = GuessingDrafter({"r": encode(ANSWER)}, right, END)
    drafted = run_all(make_engine(drafter=drafter), message)["r"]

    assert text_of(drafted) == text_of(plain)
    for answer, other in ((drafted[-1], plain[-1]),):
        assert isinstance(answer, Answer)
        assert isinstance(other, Answer)
        assert (answer.n_generated, answer.finish_reason) == (other.n_generated, other.finish_reason)
        assert answer.drafts is not None
        assert answer.drafts.accepted <= answer.n_generated


def test_what_ends_at_a_stop_string_frees_its_slots_and_tells_its_length() -> None:
    engine = make_engine(drafter=GuessingDrafter({"r": encode(ANSWER)}, 1.0, END))
    ended: list[int | None] = []
    release = engine.scheduler.pool.release
    engine.scheduler.pool.release = lambda name, n=None: (ended.append(n), release(name, n))[1]  # type: ignore[method-assign]

    run_all(engine, Submit("r", tuple(encode("a")), 30, GREEDY, ("fgh",)))

    assert ended == [7]
    assert engine.scheduler.pool.stats().slots_used == 0


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_an_end_token_ends_a_run_and_no_draft_behind_it_counts(right: float) -> None:
    def successor(last: int) -> int:
        return END if last == ord("f") else last + 1

    drafter = GuessingDrafter({"r": [*encode("bcdef"), END, 1, 2, 3]}, right, END)
    outs = run_all(
        make_engine(FakeRanks(successor), drafter=drafter), Submit("r", tuple(encode("a")), 50, GREEDY)
    )

    last = outs["r"][-1]
    assert isinstance(last, Answer)
    assert (text_of(outs["r"]), last.finish_reason, last.n_generated) == ("bcdef", "stop", 6)


@examples(30)
@given(
    prompts=st.lists(st.text(alphabet="abcxyz€", min_size=1, max_size=60), min_size=1, max_size=6),
    right=st.sampled_from((0.3, 0.9)),
    temperature=st.sampled_from((0.0, 0.7, 1.5)),
    penalty=st.sampled_from((1.0, 1.3)),
    seed=st.integers(0, 1000),
)
def test_seeded_answers_are_the_same_tokens(
    prompts: list[str], right: float, temperature: float, penalty: float, seed: int
) -> None:
    sampling = SamplingParams(temperature, top_p=0.95, seed=seed, repetition_penalty=penalty, top_logprobs=2)
    messages = [
        Submit(str(i), tuple(encode(prompt)), 20, sampling, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    plain = run_all(make_engine(), *messages)
    answers = {name: token_ids(outs) for name, outs in plain.items()}

    drafted = run_all(make_engine(drafter=GuessingDrafter(answers, right, END, seed)), *messages)

    for name, outs in plain.items():
        assert tokens_of(drafted[name]) == tokens_of(outs)  # with their log-probabilities


def tokens_of(outs: list[Answer | Failure]) -> list[object]:
    return [token for out in outs if isinstance(out, Answer) for token in out.tokens]


class SmallRanks(AttentiveRanks):
    """A draft model: what it reads must have been computed here; it agrees with `target` now and then."""

    vocab_size = VOCAB_SIZE

    def __init__(self, disagrees: Callable[[int], bool]) -> None:
        super().__init__(successor=lambda token_id: token_id, kv_slots=4096)
        self.disagrees = disagrees
        self.n_rows = 0

    def forward(self, batch: Batch) -> np.ndarray:
        rows = []
        for piece in batch.slices:
            slots = slots_of(piece)
            self.kv[slots[piece.start :]] = piece.token_ids
            self.n_rows += len(piece.token_ids)
            if piece.wants_logits:
                wanted = self.choose_by(self.kv[slots])
                rows.append(self._logits((wanted + self.disagrees(self.n_rows)) % END))
        return np.array(rows, dtype=np.float32).reshape(-1, VOCAB_SIZE)


def model_drafter(disagrees: Callable[[int], bool], n_tokens: int | None = None) -> ModelDrafter:
    """One whose steps seem to be worth drafting for."""
    return ModelDrafter(SmallRanks(disagrees), CheapRows(), 64, VOCAB_SIZE, n_tokens=n_tokens)


class CheapRows(StepCosts):
    """Rows that cost nothing, so that much is drafted."""

    def observe(self, n_rows: int, duration_ns: float) -> None:
        super().observe(n_rows, 1e9)


def lookup_drafter(n_tokens: int | None = None) -> LookupDrafter:
    return LookupDrafter(CheapRows(), 64, n_tokens)


@pytest.mark.parametrize("policy", POLICIES)
@examples(20)
@given(
    asked=asked,
    every=st.integers(2, 9),
    reuse=st.booleans(),
    chunk=st.integers(1, 64),
    clients=CLIENTS,
    n_tokens=st.sampled_from([None, 1, 5]),
)
@example(  # a prompt that drafts paid too little for, and one that begins with it
    asked=[((1, 4), (0, 0), None), ((16, 1), (1, 0), None), ((17, 3), (0, 0), None)],
    every=2,
    reuse=True,
    chunk=1,
    clients="a",
    n_tokens=None,
)
def test_a_draft_model_changes_no_token_and_reads_what_it_has_computed(
    policy: str,
    asked: list[tuple[tuple[int, int], tuple[int, int], None]],
    every: int,
    reuse: bool,
    chunk: int,
    clients: str,
    n_tokens: int | None,
) -> None:
    """Its slots move, are copied and are given to others with those of the model that is served."""
    drafter = model_drafter(lambda n_rows: n_rows % every == 0, n_tokens)
    engine = attentive_engine(
        pool=any_pool(policy, N_SLOTS, CONTEXT), max_sequences=4, prefix_reuse=reuse, drafter=drafter
    )
    engine._pace = lambda: (chunk, None)  # type: ignore[method-assign]
    requests = requests_of(asked, clients)

    got = run_all(engine, *[submit(each_request) for each_request in requests])

    for each_request in requests:
        assert token_ids(got[each_request.request_id]) == alone(each_request)


def test_a_draft_model_that_always_agrees_is_always_right() -> None:
    """Also across growth and moves: so every position of its own keys and values is the sequence's."""
    requests = [Request(str(i), tuple(range(1 + i, 60 + i)), 200) for i in range(3)]
    engine = attentive_engine(
        kv_slots=1200, context_length=300, prefix_reuse=False, drafter=model_drafter(lambda _: False)
    )

    got = run_all(engine, *[submit(each_request) for each_request in requests])

    for each_request in requests:
        assert token_ids(got[each_request.request_id]) == alone(each_request)
    load = engine.load()
    assert load.drafts is not None
    assert load.drafts.rejected == 0
    assert load.drafts.accepted > 300


@pytest.mark.parametrize("n_tokens", [1, 4, 15])
def test_drafts_of_a_stated_length_have_it_and_change_no_token(n_tokens: int) -> None:
    message = Submit("r", tuple(encode("a")), 100, GREEDY, ignore_eos=True)
    drafter = lookup_drafter(n_tokens)
    engine, drafted, observe = make_engine(drafter=drafter), [], drafter.observe
    drafter.observe = lambda batch, ns: (drafted.append(batch.n_tokens - 1), observe(batch, ns))  # type: ignore

    outs = run_all(engine, message)["r"]

    assert text_of(outs) == text_of(run_all(make_engine(), message)["r"])
    assert max(drafted) == n_tokens
    assert drafted.count(n_tokens) > 1


def test_an_answer_that_repeats_itself_is_found_by_lookup() -> None:
    engine = make_engine(drafter=lookup_drafter())
    message = Submit("r", tuple(encode("a")), 300, GREEDY, ignore_eos=True)

    outs = run_all(engine, message)["r"]

    assert text_of(outs) == text_of(run_all(make_engine(), message)["r"])
    last = outs[-1]
    assert isinstance(last, Answer)
    assert last.drafts is not None
    assert last.drafts.accepted > 200
    assert len(outs) < 100


@pytest.mark.parametrize("make_drafter", [lookup_drafter, lambda: model_drafter(lambda n: n % 3 == 0)])
def test_answers_go_on_after_ranks_were_lost(make_drafter: Callable[[], Drafter]) -> None:
    ranks = AttentiveRanks(successor=lambda token_id: token_id)
    engine = make_engine(ranks, drafter=make_drafter(), context_length=CONTEXT)
    only_request = Request("a", tuple(range(40)), 60)
    engine.submit(submit(only_request))
    before = list(engine.step().outs)
    ranks.lose()
    with pytest.raises(RankLost) as lost:
        engine.step()
    ranks.reopen()
    engine.recover(lost.value)

    outs = run_all(engine)

    assert token_ids(before) + token_ids(outs["a"]) == alone(only_request)


class Turned:
    """A scheduler in a decode step."""

    def __init__(self) -> None:
        self.scheduler = make(n_slots=160, context=100)
        self.scheduler.add(request("a", 5, 6))
        batch = self.scheduler.next_batch()
        assert batch is not None
        self.scheduler.commit(batch, [1])
        batch = self.scheduler.next_batch()
        assert batch is not None
        self.batch = batch


@pytest.fixture
def turned() -> Turned:
    return Turned()


def test_drafts_never_reach_beyond_the_last_token(turned: Turned) -> None:
    scheduler = turned.scheduler
    assert [room.most for room in scheduler.draft_rooms(turned.batch)] == [4]

    batch = scheduler.extend(turned.batch, [(2, 3, 4, 5)])
    outs = scheduler.commit_runs(batch, [(2, 3, 4, 5, 6)])

    assert [out.n_generated for out in outs] == [2, 3, 4, 5, 6]
    assert [out.finish_reason for out in outs] == [None] * 4 + ["length"]
    assert not scheduler.has_work


def test_misuse_is_an_error(turned: Turned) -> None:
    scheduler, batch = turned.scheduler, turned.batch
    with pytest.raises(SchedulerError, match="5 drafts"):
        scheduler.extend(batch, [(1, 2, 3, 4, 5)])
    extended = scheduler.extend(batch, [(1, 2)])
    with pytest.raises(SchedulerError, match="under way"):
        scheduler.commit(batch, [1])
    with pytest.raises(SchedulerError, match="4 tokens sampled after 2 drafts"):
        scheduler.commit_runs(extended, [(1, 2, 3, 4)])
