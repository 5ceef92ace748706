"""A streamed answer holds what its reader has yet to take, up to a limit, and nothing that was sent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.http.answers.client import AnswerStream, EngineClient
from phasewise.serving.http.answers.openai_objects import ChatRendering, CompletionRendering, Rendering, Reply
from phasewise.serving.http.answers.send_answer import _said
from phasewise.serving.http.answers.sse_events import Events
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.sampling.sampling import SampledToken
from tests.support.servers.fake_engine import ALPHABET, END, VOCAB_SIZE, encode, piece

MODEL = ServedModel(("fake",), 0, 500, VOCAB_SIZE, frozenset({END}), encode, piece, None)
REQUEST = Submit("one", (1, 2))


def scored_pieces(n: int) -> Iterator[Answer]:
    for place in range(n):
        token_id = ALPHABET[place % 26]
        reason = "length" if place == n - 1 else None
        yield Answer("one", chr(token_id), (_scored(token_id),), place + 1, 0, reason)


def _scored(token_id: int) -> SampledToken:
    return SampledToken(token_id, -0.5, ((token_id, -0.5), (END, -1.5)))


class Pieces:
    """A stream whose pieces come one by one."""

    closed = False

    def __init__(self, n: int) -> None:
        self._pieces = scored_pieces(n)
        self.newest: SampledToken | None = None

    async def take(self) -> list[tuple[int, Answer]]:
        answer = next(self._pieces, None)
        if answer is None:
            return []
        self.newest = answer.tokens[0]
        return [(0, answer)]


@pytest.mark.parametrize("kind", [CompletionRendering, ChatRendering])
def test_what_was_sent_is_not_held(kind: type[CompletionRendering | ChatRendering]) -> None:
    rendering: Rendering = kind("id", MODEL)
    reply = Reply([REQUEST], [], 1, rendering, streamed=True, include_usage=True)

    async def references() -> list[int]:
        """To each token, while its event waits for the reader."""
        stream = Pieces(30)
        events = _said(Events(reply), stream.take(), stream, None)  # type: ignore[arg-type]
        return [sys.getrefcount(stream.newest) async for _ in events]

    counts = asyncio.run(references())

    assert len(counts) == 31  # with the usage and the end, which are one
    assert set(counts) == {2}  # the stream's own, and that of the call


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
        for scored_piece in scored_pieces(60):
            stream.put(scored_piece)
        return len(await stream.take())

    assert asyncio.run(offer()) == 60
    assert reader.n_cut == 0


@dataclass
class FakeReader:
    """Counts how often it is cut."""

    is_behind: bool
    n_cut: int = 0

    def cut(self) -> None:
        self.n_cut += 1
