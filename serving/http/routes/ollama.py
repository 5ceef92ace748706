"""Ollama's API, as far as its clients need it to list models and to generate text."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phasewise.serving.http.answers.ollama_lines import MEDIA_TYPE, OllamaAnswering, OllamaLines, whole
from phasewise.serving.http.answers.openai_objects import ChatRendering, Form
from phasewise.serving.http.errors import naming
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.models.served_models import ListedModel, keep_for
from phasewise.serving.http.requests.calls import reading_of
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.ollama_schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    chat_of,
    prompt_of,
)
from phasewise.serving.http.requests.request_to_messages import chat_requests, completion_requests
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.http.routes.generation_service import GenerationService, reply_of
from phasewise.serving.http.routes.openapi import Json, Routes

OLLAMA_API = "0.14.0"
"""The first version of Ollama with all of what is here beside its API: /v1/responses and /v1/messages."""
_IN_CHAT = {"prompt": "messages", "response_format": "format", "max_tokens": "options"}
_IN_GENERATE = {"messages": "prompt", "response_format": "format", "max_tokens": "options"}
"""The names in these requests of fields of the requests that they are made into."""


def add_ollama(routes: Routes, service: GenerationService) -> None:
    """The routes."""

    @routes.add("/api/version", "GET")
    async def show_version(_request: Request) -> Json:
        """The version of Ollama's API that this one is, and that of this server."""
        return {"version": OLLAMA_API, "phasewise": version("phasewise")}

    @routes.add("/api/tags", "GET")
    async def tags(_request: Request) -> Json:
        """The models that are served."""
        return {"models": [await _listed(service, model) for model in await service.models.listed()]}

    @routes.add("/api/ps", "GET")
    async def ps(_request: Request) -> Json:
        """Those of them that are loaded."""
        loaded = [model for model in await service.models.listed() if model.served is not None]
        return {"models": [{**await _listed(service, model), **_running(model)} for model in loaded]}

    @routes.add("/api/show", "POST", OllamaShowRequest)
    async def show(request: Request) -> Json:
        """The kind of a model, and what it can do."""
        model = await _hold(service, request, (await service.read(request, OllamaShowRequest)).model)
        can = ["completion", *(["tools"] if model.dialect.knows_tools else [])]
        return {
            "details": _details(model.facts),
            "model_info": {
                "general.architecture": model.facts.family,
                "general.parameter_count": model.facts.n_parameters,
                f"{model.facts.family}.context_length": model.context_length,
            },
            "capabilities": [*can, "thinking"] if model.dialect.thinks else can,
            "modified_at": _at(model),
        }

    @routes.add("/api/chat", "POST", OllamaChatRequest)
    async def ollama_chat(request: Request) -> Response:
        """Answer a conversation."""
        began_ns = time.perf_counter_ns()
        body = await service.read(request, OllamaChatRequest)
        keep_for(request, body.keep_alive_s)
        model = await _hold(service, request, body.model, streams=body.streams and bool(body.messages))
        if not body.messages:
            return _loaded(model, body, {"message": {"role": "assistant", "content": ""}})
        with naming(_IN_CHAT):
            chat = await service.bodies.convert(request, lambda: chat_of(body))
            return await _answer(service, request, body, chat, model, began_ns)

    @routes.add("/api/generate", "POST", OllamaGenerateRequest)
    async def ollama_generate(request: Request) -> Response:
        """Continue a text, or answer one."""
        began_ns = time.perf_counter_ns()
        body = await service.read(request, OllamaGenerateRequest)
        keep_for(request, body.keep_alive_s)
        model = await _hold(service, request, body.model, streams=body.streams and bool(body.prompt))
        if not body.prompt:
            return _loaded(model, body, {"response": ""})
        has_template = model.encode_chat is not None
        with naming({} if body.raw or not has_template else _IN_GENERATE):
            prompt = prompt_of(body, has_template=has_template)
            return await _answer(service, request, body, prompt, model, began_ns)


async def _answer(
    service: GenerationService,
    request: Request,
    body: OllamaChatRequest | OllamaGenerateRequest,
    meant: ChatRequest | CompletionRequest,
    model: ServedModel,
    began_ns: int,
) -> Response:
    """`meant`: the request that `body` means."""
    meant = meant.model_copy(update={"model": model.model_id})
    if isinstance(meant, ChatRequest):
        requests, facts = await service.preparation.prepare(request, meant, chat_requests, model)
    else:
        requests, facts = await service.preparation.prepare(request, meant, completion_requests, model)
    (asked,) = requests
    answering = OllamaAnswering(
        model_id=model.model_id,
        n_prompt=len(asked.prompt_token_ids),
        reading=reading_of(meant, model, asked) if isinstance(meant, ChatRequest) else None,
        began_ns=began_ns,
        is_chat=isinstance(body, OllamaChatRequest),
    )
    form = Form(partial(whole, answering), partial(OllamaLines, answering), MEDIA_TYPE)
    reply = replace(reply_of(meant, requests, facts, ChatRendering("", model), model), form=form)
    return await service.answer(reply, request)


async def _hold(
    service: GenerationService, request: Request, name: str, *, streams: bool = False
) -> ServedModel:
    """Names may have a tag: `latest` is the one that every model has here."""
    return await service.models.hold(request, name.removesuffix(":latest"), streams=streams)


def _loaded(model: ServedModel, body: OllamaChatRequest | OllamaGenerateRequest, said: Json) -> Response:
    """The answer to an empty prompt, by which clients have a model loaded, or unloaded."""
    head = {"model": model.model_id, "created_at": datetime.now(UTC).isoformat()}
    reason = "unload" if body.keep_alive_s == 0 else "load"
    return JSONResponse({**head, **said, "done": True, "done_reason": reason})


async def _listed(service: GenerationService, model: ListedModel) -> Json:
    fingerprint = model.served.system_fingerprint if model.served else None
    return {
        "name": model.model_id,
        "model": model.model_id,
        "modified_at": _time(model.created_s),
        "size": model.n_bytes,
        "digest": fingerprint or "",
        "details": _details(await service.models.facts(model)),
    }


def _details(facts: ModelFacts) -> Json:
    """The fields that clients expect of a model's file."""
    n = facts.n_parameters
    size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
    return {
        "format": "phasewise",
        "parent_model": "",
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": size if n else "",
        "quantization_level": facts.format,
    }


def _running(model: ListedModel) -> Json:
    expires = {} if model.ends_s is None else {"expires_at": _time(model.ends_s)}
    context = model.served.context_length if model.served else 0
    return {**expires, "size_vram": 0, "context_length": context}


def _at(model: ServedModel) -> str:
    return _time(model.created_s)


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
