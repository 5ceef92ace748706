"""The common parts of the routes that generate text: read a request, hold its model, send its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phasewise.serving.engine.messages import Answer, Evidence, Submit
from phasewise.serving.engine.receipts import FinishReason, receipt_of
from phasewise.serving.errors import RankLost, ServingError
from phasewise.serving.http.answers.client import AnswerStream, EngineClient, Pieces
from phasewise.serving.http.answers.openai_objects import AnswerReading, AnswerWriter, Choice, Json, Reply
from phasewise.serving.http.errors import ApiError, ClientLeft, engine_errors, from_engine
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.models.served_models import ServedModels
from phasewise.serving.http.monitoring.access_log import record_of
from phasewise.serving.http.requests.body import Body, BodyReader
from phasewise.serving.http.requests.calls import reading_of
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.request_threads import Preparation, while_there
from phasewise.serving.http.requests.schemas import MOST_INT, CompletionRequest, GenerationRequest
from phasewise.serving.http.transport.connection import Connection, connection_of
from phasewise.serving.http.transport.server import Lifecycle

_TOKENS_WORTH_A_THREAD = 256
"""Log-probabilities of more tokens are written on a thread, so that other answers do not wait."""


async def respond(client: EngineClient, reply: Reply, writer: AnswerWriter, request: Request) -> Response:
    """Send a reply's requests and return the response. If the client leaves, the requests are aborted."""
    if not reply.streamed:
        body = await while_there(request, _body(client, reply, writer, request.scope))
        return Response(body, media_type="application/json")
    connection = connection_of(request.scope)
    assert connection is not None, "lines of batches are answered whole"
    stream = client.open(reply.requests, connection, tells_progress=reply.tells_progress)
    record_of(request.scope).lives = stream.lives.values()
    try:
        # Headers wait for the first piece, so that an early failure still gets its own status; but no longer
        # than clients wait for a sign of life.
        with suppress(TimeoutError):
            async with asyncio.timeout(client.limits.sign_of_life_s):
                await while_there(request, stream.begun())
        if stream.is_over:
            await stream.ended()
            raise ClientLeft
    except BaseException:
        stream.close()
        raise
    return _EventStream(writer, stream, request, connection, client.limits.sign_of_life_s)


async def _body(client: EngineClient, reply: Reply, writer: AnswerWriter, scope: Scope) -> bytes:
    try:
        choices = await _choices(client, reply.requests, scope)
    except RankLost:  # nothing of it was sent, so it may run again; late pieces of the first run are dropped
        again = [replace(asked, request_id=f"{asked.request_id}-again") for asked in reply.requests]
        choices = await _choices(client, again, scope)
    for index, choice in enumerate(choices):  # the first of a prompt has its numbers
        choice.prompt = choices[index - index % reply.n_choices_per_prompt].prompt
    n_scored = sum(len(choice.tokens) for choice in choices if choice.tokens and choice.tokens[0].top)
    n_scored += sum(len(choice.prompt) for choice in choices if choice.prompt is not None)
    if n_scored > _TOKENS_WORTH_A_THREAD:
        return await asyncio.to_thread(writer.whole, choices)
    return writer.whole(choices)


async def _choices(client: EngineClient, requests: Sequence[Submit], scope: Scope) -> list[Choice]:
    choices = [Choice() for _ in requests]

    def take(pieces: Pieces) -> bool:
        for index, piece in pieces:
            if isinstance(piece, Answer):
                choices[index].add(piece)
        return True

    stream = client.open(requests)
    record_of(scope).lives = stream.lives.values()
    stream.take = take
    try:
        await stream.ended()
    finally:
        stream.close()
    return choices


class _EventStream(Response):
    """A streamed response. All pieces that have come go to the connection in one write, so that a slow reader
    costs no more than one. However sending ends, the stream is closed and its requests are aborted."""

    def __init__(
        self,
        writer: AnswerWriter,
        stream: AnswerStream,
        request: Request,
        connection: Connection,
        every_s: float,
    ) -> None:
        """`every_s`: a keep-alive is written into a stream that is silent, within twice this time."""
        self.status_code = 200
        self.background = None
        self.media_type = writer.media_type
        self.init_headers({"Cache-Control": "no-cache"})
        self._writer = writer
        self._stream = stream
        self._request = request
        self._connection = connection
        self._every_s = every_s
        self._has_spoken = stream.has_begun
        """True if the stream has sent something since the last check."""
        self._timer: asyncio.TimerHandle | None = None
        self._opening = writer.opening()
        """Text to send before the first piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._look()
            self._stream.take, self._connection.resumed = self._write, self._stream.pass_on
            self._stream.pass_on()
            try:
                await while_there(self._request, self._stream.ended())
                end = self._writer.closing()
            except ServingError as error:
                end = self._opening + self._writer.failed(from_engine(error))
            if not self._stream.closed:
                await send({"type": "http.response.body", "body": end.encode(), "more_body": False})
        except ClientLeft:
            return
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._stream.close()
            self._connection.resumed = None

    def _write(self, pieces: Pieces) -> bool:
        """Write pieces to the connection; False if it cannot take them now."""
        if not self._connection.takes_body:
            return False
        if said := self._opening + self._writer.of(pieces):
            self._connection.write_body(said.encode())
            self._opening, self._has_spoken = "", True
        return True

    def _look(self) -> None:
        if not self._has_spoken and self._connection.takes_body:
            self._connection.write_body(self._writer.sign_of_life)
        self._has_spoken = False
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)


@dataclass(frozen=True, slots=True)
class GenerationService:
    models: ServedModels
    client: EngineClient
    bodies: BodyReader
    preparation: Preparation
    life: Lifecycle

    async def read(self, request: Request, kind: type[Body]) -> Body:
        self.life.refuse_unless_open()
        return await self.bodies.read(request, kind)

    async def answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        model: ServedModel,
        write: Callable[[Reply, AnswerReading | None], AnswerWriter],
    ) -> Response:
        """Answer a request whose model is held. `write`: makes the writer of the answer, for the API that the
        request came by. Raises ApiError or ClientLeft."""
        requests = await self.preparation.prepare(request, body, model)
        reading = reading_of(body, model, requests[0]) if isinstance(body, ChatRequest) else None
        reply = reply_of(body, requests, model)
        self.life.refuse_unless_open()
        record_of(request.scope).n_prompt = reply.n_prompt
        with engine_errors():
            response = await respond(self.client, reply, write(reply, reading), request)
        if reply.clamped is not None:
            response.headers["X-Clamped-Max-Tokens"] = str(reply.clamped)
        connection = connection_of(request.scope)
        if connection is not None:
            connection.mark_answered()
        return response


def reply_of(body: GenerationRequest, requests: Sequence[Submit], model: ServedModel) -> Reply:
    """Build the reply for prepared requests. ApiError: the fingerprint of a receipt is unknown yet."""
    clamped = [len(asked.prompt_token_ids) for asked in requests if asked.max_tokens is None]
    has_stated = body.most_tokens not in (None, MOST_INT)
    return Reply(
        requests=requests,
        model=model,
        n_choices_per_prompt=body.n or 1,
        streamed=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        tells_progress=bool(body.stream) and body.return_progress,
        receipt=_receipts_of(model) if requests[0].receipt else None,
        clamped=model.context_length - max(clamped) if clamped and has_stated else None,
    )


def _receipts_of(model: ServedModel) -> Callable[[Submit, Evidence, FinishReason], Json]:
    fingerprint = model.fingerprint()
    if fingerprint is None:
        raise ApiError(503, "receipt: no instance has told its fingerprint yet", param="receipt")

    def make(asked: Submit, evidence: Evidence, reason: FinishReason) -> Json:
        return receipt_of(asked, evidence, reason, fingerprint, model.model_id).to_json()

    return make
