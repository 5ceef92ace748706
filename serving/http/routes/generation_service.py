"""The common parts of the routes that generate text: read a request, hold its model, send its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phasewise.serving.engine.messages import Answer, Evidence, Progress, Submit
from phasewise.serving.engine.receipts import FinishReason, receipt_of
from phasewise.serving.errors import RankLost, ServingError
from phasewise.serving.http.answers.client import AnswerStream, EngineClient, Pieces
from phasewise.serving.http.answers.openai_objects import (
    EVENT_STREAM,
    NOTHING_YET,
    Choice,
    EventWriter,
    Form,
    Json,
    Rendering,
    Reply,
    encode,
)
from phasewise.serving.http.errors import ApiError, ClientLeft, from_engine
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.models.served_models import ServedModels
from phasewise.serving.http.monitoring.access_log import AccessLog, record_of
from phasewise.serving.http.requests.body import BodyReader
from phasewise.serving.http.requests.request_threads import Preparation
from phasewise.serving.http.requests.schemas import MOST_INT, GenerationRequest, Strict
from phasewise.serving.http.transport.connection import Connection, connection_of
from phasewise.serving.http.transport.server import Lifecycle


class SignsOfLife:
    """Writes `sign` into a stream that is silent, within twice `every_s`. Used on the event loop."""

    def __init__(self, connection: Connection, sign: bytes, every_s: float, *, has_spoken: bool) -> None:
        self.has_spoken = has_spoken
        """True if the stream has sent something since the last check."""
        self._connection = connection
        self._sign = sign
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._look()

    def end(self) -> None:
        """Stop the timer: the stream has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        if not self.has_spoken and self._connection.takes_chunk:
            self._connection.write_chunk(self._sign)
        self.has_spoken = False
        self._timer = self._loop.call_later(self._every_s, self._look)


DONE = b"data: [DONE]\n\n"


class Events(EventWriter):
    """Writes the server-sent events of one OpenAI stream."""

    def __init__(self, reply: Reply) -> None:
        assert isinstance(reply.rendering, Rendering)
        self._reply, self._rendering = reply, reply.rendering
        self._head = encode(self._rendering.head(streamed=True))[:-1]
        self._said = [NOTHING_YET] * len(reply.requests)
        """Counts of each choice so far. Tokens are not kept: with log-probabilities they are megabytes."""

    def opening(self) -> bytes:
        openings = [self._rendering.opening(index) for index in range(len(self._said))]
        return "".join([self._event(opening) for opening in openings if opening is not None]).encode()

    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> bytes:
        return "".join(
            [
                self._delta(index, piece) if isinstance(piece, Answer) else self._progress(index, piece)
                for index, piece in pieces
            ]
        ).encode()

    def failed(self, error: ApiError) -> bytes:
        return f"data: {encode(error.body())}\n\n".encode()

    def closing(self) -> bytes:
        """The `usage` event if requested, and `[DONE]`."""
        if not self._reply.include_usage:
            return DONE
        usage = encode(self._reply.usage(self._said))
        return f'data: {self._head},"choices":[],"usage":{usage}}}\n\n'.encode() + DONE

    def _progress(self, index: int, progress: Progress) -> str:
        """A prompt's progress in llama-server's form; empty except for the prompt's first choice."""
        if index % self._reply.n_choices_per_prompt:
            return ""
        said = {
            "total": progress.n_prompt,
            "cache": progress.n_cached,
            "processed": progress.n_computed,
            "time_ms": progress.took_ns // 1_000_000,
        }
        choice = encode(self._rendering.waiting(index))
        return f'data: {self._head},"choices":[{choice}],"prompt_progress":{encode(said)}}}\n\n'

    def _delta(self, index: int, piece: Answer) -> str:
        delta = None
        if piece.text or piece.tokens or piece.finish_reason or piece.prompt:
            delta = self._rendering.delta(index, piece)
        if delta is not None:
            delta = self._reply.with_receipt(index, delta, piece) if piece.evidence is not None else delta
        self._said[index] = piece.counts
        return "" if delta is None else self._event(delta)

    def _event(self, choice: Json) -> str:
        return f'data: {self._head},"choices":[{encode(choice)}]}}\n\n'


_TOKENS_WORTH_A_THREAD = 256
"""Log-probabilities of more tokens are written on a thread, so that other answers do not wait."""


async def respond(client: EngineClient, reply: Reply, request: Request) -> Response:
    """Send a reply's requests and return the response. If the client leaves, the requests are aborted."""
    if reply.streamed:
        return await _streamed(client, reply, request)
    return await _whole(client, reply, request)


class _UnseenReader:
    """Stands for a connection of another ASGI server, which does not say how far the client has read."""

    is_behind = True

    def cut(self) -> None:
        """No effect: there is no connection to cut, and the stream closes itself."""


async def _streamed(client: EngineClient, reply: Reply, request: Request) -> Response:
    connection = connection_of(request.scope)
    stream = client.open(reply.requests, connection or _UnseenReader(), tells_progress=reply.tells_progress)
    leaving = _closing_when_gone(stream, request)
    first = asyncio.ensure_future(stream.take())
    form = reply.rendering
    events = form.events() if isinstance(form, Form) else Events(reply)
    media_type = form.media_type if isinstance(form, Form) else EVENT_STREAM
    every_s = client.sign_of_life_s
    try:
        # Headers wait for the first piece, so that an early failure still gets its own status; but no longer
        # than clients wait for a sign of life.
        await asyncio.wait((first,), timeout=every_s)
        if first.done():
            first.result()
        if stream.closed:
            raise ClientLeft
    except BaseException:
        first.cancel()
        leaving.cancel()
        stream.close()
        raise
    return _EventStream(events, first, stream, leaving, every_s, media_type)


async def _whole(client: EngineClient, reply: Reply, request: Request) -> Response:
    making = asyncio.ensure_future(_body(client, reply, request))
    try:
        return Response(await making, media_type="application/json")
    except BaseException:
        making.cancel()
        raise


async def _body(client: EngineClient, reply: Reply, request: Request) -> bytes:
    try:
        choices = await _choices(client, reply, request)
    except RankLost:  # nothing of it was sent, so it may run again, from the start
        choices = await _choices(client, _renamed(reply), request)
    n_scored = sum(len(choice.tokens) for choice in choices if choice.tokens and choice.tokens[0].top)
    n_scored += sum(len(choice.prompt) for choice in choices if choice.prompt is not None)
    if n_scored > _TOKENS_WORTH_A_THREAD:
        return await asyncio.to_thread(_written, reply, choices)
    return _written(reply, choices)


def _renamed(reply: Reply) -> Reply:
    """The reply with new request ids, for a second run: late pieces of the first run are dropped."""
    return replace(
        reply, requests=[replace(asked, request_id=f"{asked.request_id}-again") for asked in reply.requests]
    )


async def _choices(client: EngineClient, reply: Reply, request: Request) -> list[Choice]:
    stream = client.open(reply.requests)
    leaving = _closing_when_gone(stream, request)
    choices = [Choice() for _ in reply.requests]
    try:
        while pieces := await stream.take():
            for index, piece in pieces:
                if isinstance(piece, Answer):
                    choices[index].add(piece)
        if stream.closed:
            raise ClientLeft
    finally:
        leaving.cancel()
        stream.close()
    for index, choice in enumerate(choices):  # the first of a prompt has its numbers
        choice.prompt = choices[index - index % reply.n_choices_per_prompt].prompt
    return choices


def _written(reply: Reply, choices: Sequence[Choice]) -> bytes:
    """The body of a whole reply, encoded by choice: encoding one long text blocks all other threads."""
    rendering = reply.rendering
    if isinstance(rendering, Form):
        return rendering.whole(choices)
    whole = [
        encode(reply.with_receipt(index, rendering.whole(index, choice), choice.last))
        for index, choice in enumerate(choices)
    ]
    head = encode(rendering.head(streamed=False))
    used = [choice.last for choice in choices]
    beside = encode({"usage": reply.usage(used), **rendering.rest(choices)})
    return f'{head[:-1]},"choices":[{",".join(whole)}],{beside[1:]}'.encode()


class _EventStream(Response):
    """A streamed response. However sending ends, the stream is closed and its requests are aborted."""

    def __init__(
        self,
        events: EventWriter,
        first: asyncio.Task[Pieces],
        stream: AnswerStream,
        leaving: asyncio.Task[None],
        every_s: float,
        media_type: str,
    ) -> None:
        """`every_s`: seconds of silence after which a keep-alive is written."""
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-cache"})
        self._events = events
        self._first: asyncio.Task[Pieces] | None = first
        self._stream = stream
        self._leaving = leaving
        self._every_s = every_s
        self._has_spoken = first.done()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        signs = at_once = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            connection = connection_of(scope)
            if connection is not None:
                sign = self._events.sign_of_life
                signs = SignsOfLife(connection, sign, self._every_s, has_spoken=self._has_spoken)
                at_once = partial(_write_at_once, self._events, connection, signs)
            async for said in _said(self._events, self._take_first(), self._stream, at_once):
                if signs is not None:
                    signs.has_spoken = True
                await send({"type": "http.response.body", "body": said, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if signs is not None:
                signs.end()
            if self._first is not None:
                self._first.cancel()
            self._leaving.cancel()
            self._stream.close()

    async def _take_first(self) -> Pieces:
        assert self._first is not None
        pieces = await self._first
        self._first = None  # it would hold them
        return pieces


def _write_at_once(
    events: EventWriter, connection: Connection, signs: SignsOfLife | None, pieces: Pieces
) -> bool:
    """Write pieces directly to the connection, past the ASGI layers; False if it cannot take them now."""
    if not connection.takes_chunk:
        return False
    if said := events.of(pieces):
        connection.write_chunk(said)
        if signs is not None:
            signs.has_spoken = True
    return True


async def _said(
    events: EventWriter,
    first: Awaitable[Pieces],
    stream: AnswerStream,
    at_once: Callable[[Pieces], bool] | None,
) -> AsyncIterator[bytes]:
    """Bytes of the stream, with all pieces that have come in one write, so that a slow reader costs no more
    than one. `at_once`: writes later pieces directly where it can."""
    begin = events.opening()
    try:
        pieces = await first
        stream.at_once = at_once
        while pieces:
            said = begin + events.of(pieces)
            begin, pieces = b"", []  # its reader may take long, and as many may come meanwhile
            if said:
                yield said
            pieces = await stream.take()
    except ServingError as error:
        yield begin + events.failed(from_engine(error))
        return
    if stream.closed:
        return
    yield events.closing()


def _closing_when_gone(stream: AnswerStream, request: Request) -> asyncio.Task[None]:
    """Start a task that closes `stream`, and so frees its KV slots, once the client closes the connection."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stream.close()

    return asyncio.ensure_future(wait())


Body = TypeVar("Body", bound=Strict)


@dataclass(frozen=True, slots=True)
class GenerationService:
    models: ServedModels
    client: EngineClient
    bodies: BodyReader
    preparation: Preparation
    life: Lifecycle
    log: AccessLog | None

    async def read(self, request: Request, kind: type[Body]) -> Body:
        self.life.refuse_unless_open()
        return await self.bodies.read(request, kind)

    def with_receipts(self, reply: Reply, model: ServedModel) -> Reply:
        """The reply, with receipts if requested. Raises ApiError while the fingerprint is unknown."""
        if not reply.requests[0].receipt:
            return reply
        fingerprint = model.fingerprint()
        if fingerprint is None:
            raise ApiError(503, "receipt: no instance has told its fingerprint yet", param="receipt")

        def make(asked: Submit, evidence: Evidence, reason: FinishReason) -> dict[str, Any]:
            return receipt_of(asked, evidence, reason, fingerprint, model.model_id).to_json()

        return replace(reply, receipt=make)

    async def answer(self, reply: Reply, request: Request) -> Response:
        self.life.refuse_unless_open()
        record = record_of(request.scope)
        if record is not None and self.log is not None:
            self.log.expects(record, reply.requests, reply.usage([])["prompt_tokens"])
        try:
            response = await respond(self.client, reply, request)
        except ServingError as error:
            raise from_engine(error) from error
        if reply.clamped is not None:
            response.headers["X-Clamped-Max-Tokens"] = str(reply.clamped)
        connection = connection_of(request.scope)
        if connection is not None:
            connection.mark_answered()
        return response


def reply_of(
    body: GenerationRequest, requests: Sequence[Submit], rendering: Rendering | Form, model: ServedModel
) -> Reply:
    """Build the reply for prepared requests."""
    clamped = [len(asked.prompt_token_ids) for asked in requests if asked.max_tokens is None]
    has_stated = body.most_tokens not in (None, MOST_INT)
    return Reply(
        requests=requests,
        n_choices_per_prompt=body.n or 1,
        rendering=rendering,
        streamed=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        tells_progress=bool(body.stream) and body.return_progress,
        clamped=model.context_length - max(clamped) if clamped and has_stated else None,
    )


def response_id_of(requests: Sequence[Submit]) -> str:
    """`cmpl-HEX` of the request id `cmpl-HEX-0-0`."""
    return "-".join(requests[0].request_id.split("-")[:2])
