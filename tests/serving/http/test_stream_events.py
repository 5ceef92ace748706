"""Streams sent at once: the same events as the long way round, in order, while their reader keeps up."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable

import pytest

from phasewise.serving.engine.messages import Answer, Failure, Submit
from phasewise.serving.errors import StepFailed
from phasewise.serving.http.answers.client import AnswerStream, EngineClient
from phasewise.serving.http.answers.loop_wakeup import LoopWakeup
from phasewise.serving.http.answers.openai_objects import ChatRendering, CompletionRendering, Reply
from phasewise.serving.http.answers.sse_events import Events
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.sampling.sampling import SampledToken, SamplingParams
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.servers.fake_server import fake_server
from tests.support.servers.rude_clients import ENOUGH_S, connect

MODEL = ServedModel(('a "model"\0',), 0, 500, VOCAB_SIZE, frozenset({END}), encode, piece, None)
TEXTS = ["a", ' "b"\\', "\0", "\n\u2028", "é", "\U0001f600", '"text":"\0"', "data: [DONE]\n\n"]
KINDS = [CompletionRendering, ChatRendering]
Kind = type[CompletionRendering | ChatRendering]


def events_of(kind: Kind, *, sampling: SamplingParams | None = None, counted: bool = False) -> Events:
    requests = [Submit(f"one-{index}", (1, 2), sampling=sampling or SamplingParams()) for index in range(2)]
    rendering = kind("id", MODEL)
    return Events(Reply(requests, [], 2, rendering, True, include_usage=True, continuous_usage=counted))


def said(index: int, text: str, n_generated: int = 1, reason: str | None = None) -> Answer:
    return Answer(f"one-{index}", text, (SampledToken(97),), n_generated, 0, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_alone_makes_the_same_event_quickly(kind: Kind, text: str) -> None:
    pieces = [(0, said(0, text)), (1, said(1, text[::-1]))]

    events = events_of(kind)  # both ways: it has the second in which it was made

    assert events.of_text([answer for _, answer in pieces]) == events.of(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_text_alone_is_left_to_the_long_way(kind: Kind) -> None:
    others: list[Answer | Failure] = [
        said(0, ""),
        said(0, "b", reason="length"),
        Failure("one-0", StepFailed("no")),
    ]
    for other in others:
        assert events_of(kind).of_text([said(1, "a"), other]) is None
    assert events_of(kind).of_text([]) is None
    assert events_of(kind, sampling=SamplingParams(top_logprobs=0)).of_text([said(0, "a")]) is None
    assert events_of(kind, counted=True).of_text([said(0, "a")]) is None


def test_usage_counts_what_went_quickly_too() -> None:
    events = events_of(CompletionRendering)
    events.of_text([said(0, "a"), said(1, "a")])
    events.of([(0, said(0, "b", 2, "length")), (1, said(1, "b", 2, "length"))])

    assert b'"usage":{"prompt_tokens":2,"completion_tokens":4,"total_tokens":6,' in events.total()


@pytest.mark.parametrize("refusals", list(itertools.product([True, False], repeat=5)))
def test_pieces_keep_their_order_whichever_way_they_go(refusals: tuple[bool, ...]) -> None:
    """Some are refused, as while a reader is behind; after that the others wait for the task's turn."""
    heard: list[str] = []
    answers = iter(refusals)

    def at_once(outs: Iterable[Answer | Failure]) -> bool:
        if next(answers, True):
            return False
        heard.extend(out.text for out in outs if isinstance(out, Answer))
        return True

    async def listen(stream: AnswerStream) -> None:
        while pieces := await stream.take():
            heard.extend(answer.text for _, answer in pieces)
            await asyncio.sleep(0)  # as a send would: what comes now is not offered

    async def talk() -> None:
        stream = AnswerStream(EngineClient(lambda message: None, HttpLimits()), [Submit("one-0", (1,))])
        stream.at_once = at_once
        listening = asyncio.create_task(listen(stream))
        for index in range(9):
            if index % 4:
                await asyncio.sleep(0)
            stream.put(said(0, str(index), index + 1))
            stream.wake()
        stream.put(said(0, "9", 10, "length"))
        stream.wake()
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
