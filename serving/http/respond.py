"""Waiting for an answer and sending it: as one object, or as server-sent events while it is made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from phasewise.serving.errors import RankLost, ServingError
from phasewise.serving.http.client import AnswerStream, EngineClient
from phasewise.serving.http.connection import EXTENSION
from phasewise.serving.http.errors import from_engine
from phasewise.serving.http.render import Choice, Json, Rendering, usage
from phasewise.serving.http.served import PromptFacts
from phasewise.serving.messages import Answer, Submit

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_CLIENT_LEFT = 499  # nginx's; nobody reads it
_TOKENS_WORTH_A_THREAD = 256
"""Writing out the log-probabilities of more takes longer than other answers may wait."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer to be: the messages it takes, `n` of them to a prompt, and how it looks."""

    requests: Sequence[Submit]
    facts: Sequence[PromptFacts]
    n_choices_per_prompt: int
    rendering: Rendering
    streamed: bool
    include_usage: bool
    continuous_usage: bool = False
    """The usage so far in every event."""


async def respond(client: EngineClient, reply: Reply, request: Request) -> Response:
    """Send the messages and answer with what comes back. A client that leaves frees its KV slots."""
    try:
        if reply.streamed:
            return await _streamed(client, reply, request)
        return await _whole(client, reply, request)
    except _ClientLeft:
        return Response(status_code=_CLIENT_LEFT)


async def _streamed(client: EngineClient, reply: Reply, request: Request) -> Response:
    connection = request.scope.get("extensions", {}).get(EXTENSION)
    stream = client.open(reply.requests, reply.facts, connection.cut if connection else lambda: None)
    leaving = _closing_when_gone(stream, request)
    try:
        # Headers wait for the first piece, so that an early failure still gets its own status.
        first = await stream.take()
        if stream.closed:
            raise _ClientLeft
    except BaseException:
        leaving.cancel()
        stream.close()
        raise
    return _EventStream(_events(stream, reply, first), stream, leaving)


async def _whole(client: EngineClient, reply: Reply, request: Request) -> Response:
    try:
        choices = await _choices(client, reply, request)
    except RankLost:  # nothing of it was sent, so it may run again, from the start
        choices = await _choices(client, reply, request)
    n_scored = sum(len(choice.tokens) for choice in choices if choice.tokens and choice.tokens[0].top)
    if n_scored > _TOKENS_WORTH_A_THREAD:
        body = await asyncio.to_thread(_written, reply, choices)
    else:
        body = _written(reply, choices)
    return Response(body, media_type="application/json")


async def _choices(client: EngineClient, reply: Reply, request: Request) -> list[Choice]:
    stream = client.open(reply.requests, reply.facts)
    leaving = _closing_when_gone(stream, request)
    choices = [Choice() for _ in reply.requests]
    try:
        while pieces := await stream.take():
            for index, piece in pieces:
                choices[index].add(piece)
        if stream.closed:
            raise _ClientLeft
    finally:
        leaving.cancel()
        stream.close()
    return choices


def _written(reply: Reply, choices: Sequence[Choice]) -> bytes:
    """Choice by choice: a thread that writes a long text gives way to none while it does."""
    whole = [_encode(reply.rendering.whole(index, choice)) for index, choice in enumerate(choices)]
    head = _encode(reply.rendering.head(streamed=False))
    total = _encode(usage(reply.requests, choices, reply.n_choices_per_prompt))
    return f'{head[:-1]},"choices":[{",".join(whole)}],"usage":{total}}}'.encode()


class _EventStream(Response):
    """Server-sent events. However the sending ends, the engine's side of it ends too."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], stream: AnswerStream, leaving: asyncio.Task[None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache"})
        self._events = events
        self._stream = stream
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._leaving.cancel()
            self._stream.close()


async def _events(
    stream: AnswerStream, reply: Reply, pieces: list[tuple[int, Answer]]
) -> AsyncIterator[bytes]:
    """Those of all pieces that have come in one write: a reader that is behind costs no more than one."""
    head = _encode(reply.rendering.head(streamed=True))[:-1]
    choices = [Choice() for _ in reply.requests]
    openings = [reply.rendering.opening(index) for index in range(len(choices))]
    begin = b"".join(_event(head, opening) for opening in openings if opening is not None)
    try:
        while pieces:
            said = begin + b"".join(_delta(head, reply, choices, index, piece) for index, piece in pieces)
            begin, pieces = b"", []  # its reader may take long, and as many may come meanwhile
            if said:
                yield said
            pieces = await stream.take()
    except ServingError as error:
        yield b"data: " + _encode(from_engine(error).body()).encode() + b"\n\n"
        return
    if stream.closed:
        return
    if reply.include_usage:
        total = _encode(usage(reply.requests, choices, reply.n_choices_per_prompt))
        yield f'data: {head},"choices":[],"usage":{total}}}\n\n'.encode()
    yield b"data: [DONE]\n\n"


def _delta(head: str, reply: Reply, choices: list[Choice], index: int, piece: Answer) -> bytes:
    delta = None
    if piece.text or piece.tokens or piece.finish_reason:
        delta = reply.rendering.delta(index, piece, choices[index])
    choices[index].advance(piece)
    if delta is None:
        return b""
    so_far = usage(reply.requests, choices, reply.n_choices_per_prompt) if reply.continuous_usage else None
    return _event(head, delta, so_far)


def _event(head: str, choice: Json, so_far: Json | None = None) -> bytes:
    counted = "" if so_far is None else f',"usage":{_encode(so_far)}'
    return f'data: {head},"choices":[{_encode(choice)}]{counted}}}\n\n'.encode()


class _ClientLeft(Exception):
    """The connection closed before there was anything to send."""


def _closing_when_gone(stream: AnswerStream, request: Request) -> asyncio.Task[None]:
    """Closes `stream`, and so frees its slots, as soon as the client closes the connection."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stream.close()

    return asyncio.ensure_future(wait())
