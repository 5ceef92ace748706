"""Anthropic's Messages API: chat requests in another form, and their answers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.http.answers.message_events import MessageEvents, Messaging, whole
from phasewise.serving.http.answers.openai_objects import ChatRendering, Form
from phasewise.serving.http.errors import naming
from phasewise.serving.http.requests.calls import reading_of
from phasewise.serving.http.requests.message_schemas import (
    CountTokensRequest,
    MessagesRequest,
    chat_of,
)
from phasewise.serving.http.requests.request_to_messages import chat_requests, conversation_tokens
from phasewise.serving.http.routes.generation_service import GenerationService, reply_of
from phasewise.serving.http.routes.openapi import Json, Routes

_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config",
}
"""The names in these requests of fields of the chat requests that they are made into."""


def add_messages(routes: Routes, service: GenerationService) -> None:
    """The two routes."""

    @routes.add("/v1/messages", "POST", MessagesRequest)
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        body = await service.read(request, MessagesRequest)
        model = await service.models.hold(request, body.model, streams=bool(body.stream))
        with naming(_NAMES):
            chat = await service.bodies.convert(request, lambda: chat_of(body))
            requests, facts = await service.preparation.prepare(request, chat, chat_requests, model)
        (asked,) = requests
        messaging = Messaging(
            model_id=model.model_id,
            n_prompt=len(asked.prompt_token_ids),
            reading=reading_of(chat, model, asked),
            message_id=f"msg_{asked.request_id.split('-')[1]}",
            is_capped=asked.max_tokens is not None,
        )
        form = Form(partial(whole, messaging), partial(MessageEvents, messaging))
        reply = replace(reply_of(chat, requests, facts, ChatRendering("", model), model), form=form)
        with naming(_NAMES):
            return await service.answer(reply, request)

    @routes.add("/v1/messages/count_tokens", "POST", CountTokensRequest)
    async def count_tokens(request: Request) -> Json:
        """Count the tokens of a conversation as the model's template writes it out."""
        body = await service.read(request, CountTokensRequest)
        model = await service.models.hold(request, body.model)
        with naming(_NAMES):
            chat = await service.bodies.convert(request, lambda: chat_of(body))
            tokens = await service.preparation.tokenize(request, partial(conversation_tokens, chat, model))
        return {"input_tokens": len(tokens)}
