"""Streams: events in order, the same text as a whole answer, and no more held than is unread."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.live_request import AnswerText
from phasewise.serving.engine.messages import Answer, Progress, Submit
from phasewise.serving.http.answers.client import AnswerStream, EngineClient, LoopWakeup
from phasewise.serving.http.answers.openai_objects import (
    AnswerReading,
    AnswerWriter,
    ChatWriter,
    Choice,
    CompletionWriter,
    Reply,
)
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.sampling.sampling import SampledToken, SamplingParams
from phasewise.serving.text.turn_form import TurnForm
from phasewise.serving.tools.dialect import dialect_of
from tests.support.servers.fake_engine import ALPHABET, END, VOCAB_SIZE, encode, piece
from tests.support.servers.fake_server import fake_server
from tests.support.servers.rude_clients import ENOUGH_S, connect
from tests.support.tiers import examples


def said(index: int, text: str, n_generated: int = 1, reason: str | None = None) -> Answer:
    return Answer(f"one-{index}", text, (SampledToken(97),), n_generated, 0, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("refusals", list(itertools.product([True, False], repeat=5)))
def test_pieces_keep_their_order_whatever_is_refused(refusals: tuple[bool, ...]) -> None:
    """Some are refused, as while a reader is behind; they go with the next ones, or once it has read on."""
    heard: list[str] = []
    answers = iter(refusals)

    def take(pieces: Iterable[tuple[int, Answer | Progress]]) -> bool:
        if next(answers, True):
            return False
        heard.extend(piece.text for _, piece in pieces if isinstance(piece, Answer))
        return True

    async def talk() -> None:
        nonlocal answers
        stream = AnswerStream(EngineClient(lambda message: None, HttpLimits()), [Submit("one-0", (1,))])
        stream.take = take
        listening = asyncio.create_task(stream.ended())
        for index in range(9):
            if index % 4:
                await asyncio.sleep(0)
            stream.put(said(0, str(index), index + 1))
            stream.pass_on()
        stream.put(said(0, "9", 10, "length"))
        stream.pass_on()
        answers = iter([False])
        stream.pass_on()
        await listening

    asyncio.run(talk())

    assert heard == list("0123456789")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_in_chunks_for_those_who_know_them(version: str) -> None:
    body = b'{"model": "fake", "prompt": "a", "max_tokens": 26, "temperature": 0, "stream": true}'
    head = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nConnection: close\r\n"
    with fake_server() as server, connect(server.url) as raw:
        is_read = threading.Semaphore(1)
        server.ranks.before_step = lambda: is_read.acquire(timeout=ENOUGH_S)  # each piece by itself
        raw.sendall(head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        received, n_pieces = b"", 0
        while part := raw.recv(65536):
            received += part
            while n_pieces < received.count(b"data: "):
                n_pieces += 1
                is_read.release()
        answer_head, _, rest = received.partition(b"\r\n\r\n")

    content = rest if version == "1.0" else b"".join(chunks(rest))
    assert (b"chunked" in answer_head) == (version == "1.1")
    events = content.decode().split("\n\n")
    assert [event.partition('"text":"')[2][:1] for event in events[:26]] == list("bcdefghijklmnopqrstuvwxyza")
    assert events[26:] == ["data: [DONE]", ""]


def chunks(rest: bytes) -> Iterable[bytes]:
    """The chunks of a body that is whole (RFC 9112, 7.1)."""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16)
        assert rest[n : n + 2] == b"\r\n"
        if n == 0:
            assert rest == b"\r\n"
            return
        yield rest[:n]
        rest = rest[n + 2 :]


def test_the_loop_runs_after_every_wake_up() -> None:
    async def count() -> list[int]:
        woken, seen = 0, []
        loop = asyncio.get_running_loop()
        wakeup = LoopWakeup(loop, lambda: seen.append(woken))
        wakeups.append(wakeup)

        def wake() -> None:
            nonlocal woken
            for _ in range(1000):
                woken += 1
                wakeup.wake()

        waking = threading.Thread(target=wake)
        waking.start()
        await asyncio.to_thread(waking.join)
        while not seen or seen[-1] < 1000:
            await asyncio.sleep(0.001)
        return seen

    wakeups: list[LoopWakeup] = []
    seen = asyncio.run(asyncio.wait_for(count(), 60))
    wakeups.pop().close()

    assert seen[-1] == 1000


FAKE = ServedModel(("fake",), 0, 500, VOCAB_SIZE, frozenset({END}), encode, piece, None)
REQUEST = Submit("one", (1, 2))


def scored_pieces(n: int) -> Iterator[Answer]:
    for place in range(n):
        token_id = ALPHABET[place % 26]
        reason = "length" if place == n - 1 else None
        yield Answer("one", chr(token_id), (_scored(token_id),), place + 1, 0, reason)


def _scored(token_id: int) -> SampledToken:
    return SampledToken(token_id, -0.5, ((token_id, -0.5), (END, -1.5)))


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_what_was_sent_is_not_held(kind: str) -> None:
    writer = writer_of(kind, Reply([REQUEST], FAKE, streamed=True, include_usage=True))

    async def references() -> list[int]:
        """To each token, once its event is written."""
        stream = AnswerStream(EngineClient(lambda message: None, HttpLimits()), [REQUEST])
        stream.take = lambda pieces: bool(writer.of(pieces))
        counts = []
        for answer in scored_pieces(30):
            token = answer.tokens[0]
            stream.put(answer)
            stream.pass_on()
            del answer
            counts.append(sys.getrefcount(token))
        return counts

    counts = asyncio.run(references())

    assert len(counts) == 30
    assert set(counts) == {2}  # this test's own, and that of the call


@pytest.mark.parametrize("most", [1, 7, 50])
def test_no_more_is_held_than_may_be_unread(most: int) -> None:
    reader = FakeReader(is_behind=True)

    async def offer() -> list[int]:
        stream = AnswerStream(EngineClient(lambda message: None, HttpLimits()), [REQUEST], most, reader)
        held = []
        for scored_piece in scored_pieces(60):
            stream.put(scored_piece)
            held.append(len(stream._arrived))
        return held

    held = asyncio.run(offer())

    assert held[:most] == list(range(1, most + 1))
    assert set(held[most:]) == {0}
    assert reader.n_cut == 1


def test_a_reader_that_has_taken_all_is_not_cut_for_what_it_was_not_offered() -> None:
    """Pieces come faster than this process passes them on: that is no fault of the reader's."""
    reader = FakeReader(is_behind=False)

    async def offer() -> int:
        stream = AnswerStream(EngineClient(lambda message: None, HttpLimits()), [REQUEST], 7, reader)
        taken: list[Any] = []
        stream.take = lambda pieces: not taken.extend(pieces)  # type: ignore[func-returns-value]
        for scored_piece in scored_pieces(60):
            stream.put(scored_piece)
        stream.pass_on()
        return len(taken)

    assert asyncio.run(offer()) == 60
    assert reader.n_cut == 0


@dataclass
class FakeReader:
    """Counts how often it is cut."""

    is_behind: bool
    n_cut: int = 0

    def cut(self) -> None:
        self.n_cut += 1


FORMS = ("completion", "chat", "thoughts")
DIALECT = dialect_of("", lambda _text: None, frozenset(), turn=TurnForm(thought=("<think>", "</think>")))
PARTS = [
    *("<think>", "</think>", "</thi", "a", "b", "STOP", "STOPPED", "ST", "é", "€", "👩‍👩‍👧", "🏳️‍🌈", "😀"),
    *("\n", " "),
]


class Stream:
    """Tokens that are bytes of a text."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokens[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def pieces_of(tokens: Sequence[bytes], stop: tuple[str, ...], n_at_once: int) -> list[Answer]:
    """The answer as an engine gives it out, some tokens at a time."""
    text, pieces = AnswerText(Stream(tokens), stop), []
    for begin in range(0, len(tokens), n_at_once):
        run = range(begin, min(begin + n_at_once, len(tokens)))
        for token_id in run:
            text.push(SampledToken(token_id, -float(token_id), ((token_id, -1.0),)))
            if text.stopped:
                break
        reason: Any = "stop" if text.stopped else "length" if run[-1] + 1 == len(tokens) else None
        said, begun = text.take(finished=reason is not None)
        pieces.append(Answer("0", said, begun, run[-1] + 1, 0, reason))
        if reason is not None:
            break
    return pieces


def streamed_and_whole(kind: str, tokens: Sequence[bytes], pieces: Sequence[Answer]) -> list[Any]:
    """(Text, thoughts, entries, offsets) of each."""
    model = ServedModel(
        ("m",), 0, 500, len(tokens), frozenset(), lambda _text, _special: [], lambda n: tokens[n], None
    )
    reading = AnswerReading(lambda: DIALECT.reader(None, in_thought=False), lambda: "c")

    request = Submit("0", (1,), sampling=SamplingParams(top_logprobs=1))
    writer = writer_of(kind, Reply([request], model, streamed=True), reading)
    sent = "".join(writer.of([(0, piece)]) for piece in pieces)
    choices = [json.loads(line[6:])["choices"][0] for line in sent.split("\n\n") if line]
    choice = Choice()
    for part in pieces:
        choice.add(part)
    whole = json.loads(writer_of(kind, Reply([request], model), reading).whole([choice]))
    return [_facts(choices), _facts(whole["choices"])]


def writer_of(kind: str, reply: Reply, reading: AnswerReading | None = None) -> AnswerWriter:
    if kind == "completion":
        return CompletionWriter(reply, CompletionRequest(model="m", prompt="a"))
    return ChatWriter(reply, reading if kind == "thoughts" else None)


def _facts(choices: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    said = [
        choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices
    ]
    text = "".join(part.get("content") or "" for part in said)
    thoughts = "".join(part.get("reasoning_content") or "" for part in said)
    if "text" in choices[0]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return (
            text,
            thoughts,
            [entry for part in told for entry in zip(*(part[name] for name in names), strict=True)],
        )
    return text, thoughts, [entry for part in told for entry in part["content"]]


@pytest.mark.parametrize("kind", FORMS)
@given(data=st.data())
@examples(150)
def test_streamed_and_whole_are_equal_and_every_token_has_its_entry(kind: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=12))
    whole_text = ("<think>" if data.draw(st.booleans()) else "") + "".join(parts)
    spelled = whole_text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(spelled) - 1)), max_size=len(spelled))))
    tokens = [spelled[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(spelled)], strict=True)]
    tokens = [token for token in tokens if token]
    stop = data.draw(
        st.sampled_from([(), ("STOP",), ("STOPPED", "STOP"), ("STOP", "STOPPED"), ("€",), ("👧", "ab")])
    )
    pieces = pieces_of(tokens, stop, data.draw(st.integers(1, 4)))
    streamed, whole = streamed_and_whole(kind, tokens, pieces)

    assert streamed == whole
    text, thoughts, entries = streamed
    given_out = "".join(piece.text for piece in pieces)
    if kind != "thoughts":
        assert text == given_out
    n_entries = sum(len(piece.tokens) for piece in pieces)
    assert len(entries) == n_entries
    if pieces[-1].finish_reason == "length":
        assert n_entries == len(tokens)
    begins = [len(b"".join(tokens[:number]).decode("utf-8", "ignore")) for number in range(n_entries)]
    for number, entry in enumerate(entries):
        if kind == "completion":
            assert (entry[1], entry[3]) == (-float(number), begins[number])
        else:
            assert (entry["bytes"], entry["logprob"]) == (list(tokens[number]), -float(number))
    assert all(begin < len(given_out) for begin in begins) or pieces[-1].finish_reason == "length"
    assert b"".join(tokens[:n_entries]).startswith(given_out.encode())

    by_byte = [bytes([byte]) for byte in spelled]
    alone, _ = streamed_and_whole(kind, by_byte, pieces_of(by_byte, stop, 1))
    assert alone[:2] == (text, thoughts)
