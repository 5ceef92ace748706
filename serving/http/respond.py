"""Waiting for an answer and sending it: as one object, or as server-sent events while it is made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from phasewise.serving.errors import ServingError
from phasewise.serving.http.client import AnswerStream, EngineClient
from phasewise.serving.http.errors import from_engine
from phasewise.serving.http.render import Choice, Json, Rendering, usage
from phasewise.serving.messages import Answer, Submit

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_CLIENT_LEFT = 499  # nginx's; nobody reads it


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer to be: the messages it takes, `n` of them to a prompt, and how it looks."""

    requests: Sequence[Submit]
    n_choices_per_prompt: int
    rendering: Rendering
    streamed: bool
    include_usage: bool


async def respond(client: EngineClient, reply: Reply, request: Request) -> Response:
    """Send the messages and answer with what comes back. A client that leaves frees its KV slots."""
    stream = client.open(reply.requests)
    try:
        if reply.streamed:
            # Headers wait for the first piece, so that an early failure still gets its own status.
            first = await _unless_gone(stream.next(), request)
            assert first is not None, "a reply asks for at least one answer"
            return _EventStream(_events(stream, reply, first), stream)
        return JSONResponse(await _unless_gone(_whole(stream, reply), request))
    except BaseException as error:
        stream.close()
        if isinstance(error, _ClientLeft):
            return Response(status_code=_CLIENT_LEFT)
        raise


class _EventStream(StreamingResponse):
    """Server-sent events. However the sending ends, the engine's side of it ends too."""

    def __init__(self, events: AsyncIterator[bytes], stream: AnswerStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _whole(stream: AnswerStream, reply: Reply) -> Json:
    choices = [Choice() for _ in reply.requests]
    while (pair := await stream.next()) is not None:
        index, piece = pair
        choices[index].add(piece)
    stream.close()
    return {
        **reply.rendering.head(streamed=False),
        "choices": [reply.rendering.whole(index, choice) for index, choice in enumerate(choices)],
        "usage": usage(reply.requests, choices, reply.n_choices_per_prompt),
    }


async def _events(stream: AnswerStream, reply: Reply, first: tuple[int, Answer]) -> AsyncIterator[bytes]:
    head = reply.rendering.head(streamed=True)
    choices = [Choice() for _ in reply.requests]
    for index in range(len(choices)):
        opening = reply.rendering.opening(index)
        if opening is not None:
            yield _event({**head, "choices": [opening]})
    try:
        pair: tuple[int, Answer] | None = first
        while pair is not None:
            index, piece = pair
            if piece.text or piece.tokens or piece.finish_reason:
                yield _event({**head, "choices": [reply.rendering.delta(index, piece, choices[index])]})
            choices[index].add(piece)
            pair = await stream.next()
    except ServingError as error:
        yield _event(from_engine(error).body())
        return
    if reply.include_usage:
        total = usage(reply.requests, choices, reply.n_choices_per_prompt)
        yield _event({**head, "choices": [], "usage": total})
    yield b"data: [DONE]\n\n"


def _event(fields: Json) -> bytes:
    return b"data: " + _encode(fields).encode() + b"\n\n"


class _ClientLeft(Exception):
    """The connection closed before there was anything to send."""


async def _unless_gone(work: Coroutine[Any, Any, T], request: Request) -> T:
    """The result of `work`, which is cancelled where the client closes the connection first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
