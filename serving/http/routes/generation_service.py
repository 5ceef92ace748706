"""The parts that the routes which generate text share: reading a request, its model, its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.engine.messages import Evidence, Submit
from phasewise.serving.engine.receipts import FinishReason, receipt_of
from phasewise.serving.errors import ServingError
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.answers.openai_objects import Rendering, Reply
from phasewise.serving.http.answers.send_answer import respond
from phasewise.serving.http.errors import ApiError, from_engine
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.models.served_models import ServedModels
from phasewise.serving.http.monitoring.access_log import AccessLog, record_of
from phasewise.serving.http.requests.body import BodyReader
from phasewise.serving.http.requests.request_threads import Preparation
from phasewise.serving.http.requests.schemas import MOST_INT, GenerationRequest, Strict
from phasewise.serving.http.transport.connection import connection_of
from phasewise.serving.http.transport.server import Lifecycle

Body = TypeVar("Body", bound=Strict)


@dataclass(frozen=True, slots=True)
class GenerationService:
    """The services that the routes which generate text need."""

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
        """The same reply, with receipts where its requests ask for them. ApiError: not yet."""
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
    body: GenerationRequest,
    requests: Sequence[Submit],
    rendering: Rendering,
    model: ServedModel,
) -> Reply:
    """The reply to a request that has been prepared."""
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
    """`cmpl-HEX` of the engine's `cmpl-HEX-0-0`."""
    return "-".join(requests[0].request_id.split("-")[:2])
