"""Answers that had begun when what computed them was lost go on: text, tokens and evidence are those of an
undisturbed run, in the same engine and in another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.contract import Draft
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.live_request import AnswerText, GivenSoFar
from phasewise.serving.engine.messages import Answer, Failure, GivenOut, Submit
from phasewise.serving.errors import RankLost, RequestError
from phasewise.serving.processes.restarts import MOST_RERUNS
from phasewise.serving.sampling.sampling import GREEDY, SampledToken, Sampler, SamplingParams
from phasewise.serving.scheduling.request import DraftRoom
from tests.support.servers.fake_engine import (
    ALPHABET,
    END,
    VOCAB_SIZE,
    AttentiveRanks,
    encode,
    make_engine,
    text_of,
)
from tests.support.tiers import examples
from tests.support.whole_answers import whole_answer

LOST = RankLost("rank 1 (pid 7) was killed by SIGKILL")


class TurnGuide:
    """Lets no token follow one of the same parity, and ends nothing."""

    end_token_id = END

    def __init__(self) -> None:
        self._last: int | None = None

    def fresh(self) -> TurnGuide:
        return TurnGuide()

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        if self._last is not None:
            logits[self._last % 2 :: 2] = -np.inf
        return True

    def advance(self, token_id: int) -> None:
        self._last = token_id


class LastAgain:
    """A drafter that says what came last, and the neighbour of it."""

    def observe(self, batch: Batch, duration_ns: int) -> None: ...

    def computed(self, batch: Batch) -> None: ...

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        lasts = [room.sequence.generated[-1] for room in rooms]
        return [
            Draft((last, min(last + 1, END - 1))[: room.most])
            for last, room in zip(lasts, rooms, strict=True)
        ]

    def ended(self, request_id: str) -> None: ...

    def lost(self) -> None: ...


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.7, 1.5)),
    top_k=st.sampled_from((None, 5)),
    top_p=st.sampled_from((1.0, 0.9)),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from((1.0, 1.4)),
    frequency_penalty=st.sampled_from((0.0, 0.8)),
    presence_penalty=st.sampled_from((0.0, -0.5)),
    logit_bias=st.sampled_from(({}, {END: 3.0}, {101: 2.5})),
    top_logprobs=st.sampled_from((None, 0, 3)),
)
requests = st.builds(
    Submit,
    request_id=st.just(""),
    prompt_token_ids=st.text(alphabet="abcxyz", min_size=1, max_size=40).map(
        lambda text: tuple(encode(text))
    ),
    max_tokens=st.integers(1, 40),
    sampling=samplings,
    stop=st.lists(st.text(alphabet="abcde", min_size=1, max_size=3), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    guide=st.sampled_from((None, TurnGuide())),
    receipt=st.booleans(),
    prompt_logprobs=st.sampled_from((None, None, 2)),
)


def letters(kv_slots: int = 1 << 20) -> AttentiveRanks:
    """The next token depends on all before it, and is mostly a letter."""
    return AttentiveRanks(lambda token_id: ALPHABET[token_id % 26], kv_slots)


def step(engine: Engine, outs: dict[str, list[Answer | Failure]]) -> None:
    for out in engine.step().outs:
        outs[out.request_id].append(out)
    engine.scheduler.check()


def undisturbed(message: Submit) -> dict[str, Any]:
    engine = make_engine(letters())
    engine.submit(message)
    outs: dict[str, list[Answer | Failure]] = {message.request_id: []}
    while engine.has_work:
        step(engine, outs)
    return whole_answer(outs[message.request_id])


@examples(150)
@given(
    asked=st.lists(requests, min_size=1, max_size=5),
    losses=st.lists(st.tuples(st.integers(0, 15), st.booleans()), min_size=1, max_size=MOST_RERUNS),
    policy=st.sampled_from(("odma", "paged")),
    has_drafter=st.booleans(),
)
def test_after_ranks_were_lost_every_answer_is_that_of_an_undisturbed_run(
    asked: list[Submit], losses: list[tuple[int, bool]], policy: str, has_drafter: bool
) -> None:
    """Between steps and in the midst of one; what was given out is not given out again."""
    messages = [replace(message, request_id=str(number)) for number, message in enumerate(asked)]
    ranks = letters()
    drafter = LastAgain() if has_drafter else None
    engine = make_engine(ranks, kv_slots=1024, context_length=512, kv_policy=policy, drafter=drafter)
    outs: dict[str, list[Answer | Failure]] = {message.request_id: [] for message in messages}
    for message in messages:
        engine.submit(message)
    for n_steps, is_in_midst in losses:
        for _ in range(n_steps):
            if engine.has_work:
                step(engine, outs)
        if is_in_midst and engine.has_work:
            ranks.lose()
            with pytest.raises(RankLost):
                engine.step()
        ranks.reopen()
        n_before = engine.n_continued
        n_live = len(engine.scheduler.request_ids())
        delivery = engine.recover(LOST)
        engine.scheduler.check()
        assert not delivery.outs
        assert delivery.load.n_waiting == n_live
        assert engine.n_continued - n_before <= n_live
    while engine.has_work:
        step(engine, outs)

    for message in messages:
        assert whole_answer(outs[message.request_id]) == undisturbed(message)


@examples(100)
@given(message=requests, moments=st.lists(st.integers(0, 12), min_size=1, max_size=6), data=st.data())
def test_another_engine_goes_on_from_what_was_given_out(
    message: Submit, moments: list[int], data: st.DataObject
) -> None:
    """As a front does it, from engine to engine; some compute the prompt for another."""
    given_out = GivenSoFar(replace(message, request_id="r"))
    outs: dict[str, list[Answer | Failure]] = {"r": []}
    for moment in (*moments, 10_000):
        engine = make_engine(letters())
        if moment and data.draw(st.booleans(), label="divided") and given_out.request.prompt_logprobs is None:
            answer_divided(engine, given_out, outs)
        else:
            engine.submit(given_out.request)
        for _ in range(moment):
            if not engine.has_work:
                break
            n_before = len(outs["r"])
            step(engine, outs)
            for out in outs["r"][n_before:]:
                assert isinstance(out, Answer)
                given_out.add(out)
        if not engine.has_work:
            break
        given_out.n_reruns = 0  # the bound has a test of its own
        again = given_out.after(LOST)
        assert isinstance(again, GivenSoFar)
        given_out = again

    assert whole_answer(outs["r"]) == undisturbed(replace(message, request_id="r"))


class _Outbox:
    """Keeps the logits of a prompt that another engine answers."""

    def __init__(self) -> None:
        self.logits: npt.NDArray[np.float32] | None = None

    def starts(self, request_id: str, placement: object, n_prompt: int, n_computed: int) -> None: ...

    def computed(self, request_id: str, logits: npt.NDArray[np.float32]) -> None:
        self.logits = logits.copy()

    def rests(self, request_id: str) -> bool:
        return False

    def lost(self, request_id: str) -> None: ...

    def drop(self, request_id: str) -> None: ...


def answer_divided(engine: Engine, given_out: GivenSoFar, outs: dict[str, list[Answer | Failure]]) -> None:
    """Its prompt and what was given out are computed elsewhere; the first piece has come."""
    message = given_out.request
    elsewhere, box = make_engine(letters()), _Outbox()
    elsewhere.hand_over.outbox = box  # type: ignore[assignment]
    token_ids = message.known_token_ids
    prompt = replace(message, part="prompt", prompt_token_ids=token_ids, given=None, sampling=GREEDY)
    elsewhere.submit(replace(prompt, stop=(), guide=None))
    while box.logits is None:
        elsewhere.step()
    engine.submit(replace(message, part="answer"))
    (placed,) = engine.step().placed
    ranks = engine.ranks
    assert isinstance(ranks, AttentiveRanks)
    for position, token_id in enumerate(token_ids):
        ranks.kv[placed.placement.slot(position)] = token_id
    for out in engine.arrived("r", box.logits).outs:
        outs["r"].append(out)
        assert isinstance(out, Answer)
        given_out.add(out)
    engine.scheduler.check()


def test_a_begun_answer_comes_in_before_those_that_have_not_begun() -> None:
    """And its client is not told anew how many tokens of its prompt were reused."""
    engine = make_engine(letters(), max_sequences=1)
    for name in "ab":
        engine.submit(Submit(name, tuple(encode(name * 40)), 4, GREEDY, ignore_eos=True))
    engine.submit(
        Submit("c", tuple(encode("c" * 40)), 4, GREEDY, ignore_eos=True, given=GivenOut((99, 100), 2, 16))
    )

    outs: dict[str, list[Answer | Failure]] = {name: [] for name in "abc"}
    ended: list[str] = []
    while engine.has_work:
        step(engine, outs)
        ended += [name for name in "abc" if outs[name] and outs[name][-1].finish_reason and name not in ended]  # type: ignore[union-attr]

    assert ended == ["c", "a", "b"]
    assert [out.n_generated for out in outs["c"] if isinstance(out, Answer)] == [3, 4]
    assert {out.n_cached for out in outs["c"] if isinstance(out, Answer)} == {16}


def test_only_losses_without_a_new_token_are_counted() -> None:
    """An answer goes on as often as it comes further."""
    message = Submit("r", tuple(encode("abc")), 30, GREEDY, ignore_eos=True)
    ranks = letters()
    engine = make_engine(ranks)
    engine.submit(message)
    outs: dict[str, list[Answer | Failure]] = {"r": []}
    n_losses = 0
    while engine.has_work:
        step(engine, outs)
        ranks.reopen()
        n_losses += engine.has_work
        assert not engine.recover(LOST).outs

    assert n_losses == engine.n_continued == 29
    assert text_of(outs["r"]) == undisturbed(message)["text"]


@pytest.mark.parametrize(
    ("given_out", "says"),
    [(GivenOut((5, VOCAB_SIZE)), "token ids must be"), (GivenOut((5, 6, 7, 8)), "may have 4")],
)
def test_a_beginning_that_cannot_be_gone_on_with_is_refused(given_out: GivenOut, says: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=says):
        engine.submit(Submit("r", (1, 2), 4, given=given_out))


class Chunks:
    """Tokens of several characters: the id is the place of the text."""

    TEXTS = ("a", "b", "c", "ab", "bc", "aab", "cab", "")

    def push(self, token_id: int) -> str:
        return self.TEXTS[token_id]

    def flush(self) -> str:
        return ""


def fed(answer: AnswerText, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text and the tokens that are given out on the way."""
    text, tokens = "", list[int]()
    for token_id in token_ids:
        if answer.stopped:
            break
        answer.push(SampledToken(token_id))
        piece, ready = answer.take(finished=False)
        text += piece
        tokens += [token.token_id for token in ready]
    return text, tokens


@examples(300)
@given(
    token_ids=st.lists(st.integers(0, 7), max_size=12),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3).map(tuple),
    cut=st.integers(0, 12),
)
@example(token_ids=[3, 2, 0], stop=("abcd", "bcyz"), cut=2)
@example(token_ids=[5, 2, 2], stop=("abcc",), cut=1)
def test_text_goes_on_where_it_was_cut(token_ids: list[int], stop: tuple[str, ...], cut: int) -> None:
    """Also where a part of a token's text is held back, because a stop string may begin there."""
    whole = AnswerText(Chunks(), stop)
    begin_text, begin = fed(whole, token_ids[:cut])
    if whole.stopped:
        return
    rest_text, rest = fed(whole, token_ids[cut:])
    again = AnswerText(Chunks(), stop)
    again.begin_after(begin, len(begin_text))

    assert fed(again, token_ids[len(begin) :]) == (rest_text, rest)
    assert again.stop_text == whole.stop_text
    assert again.take(finished=True) == whole.take(finished=True)


def test_a_sampler_that_begins_later_draws_the_numbers_that_are_left() -> None:
    """Of the generator every token takes one, however they are drawn."""
    seeded = SamplingParams(temperature=1.0, seed=3)
    rows = np.random.default_rng(1).normal(size=(50, 40)).astype(np.float32)
    whole = Sampler(seeded, (1,), 40)
    chosen = [whole.sample(row) for row in rows]
    for n_before in (0, 1, 7, 49):
        later = Sampler(seeded, (1,), 40)
        later.begin_after([token.token_id for token in chosen[:n_before]])
        assert [later.sample(row) for row in rows[n_before:]] == chosen[n_before:]
