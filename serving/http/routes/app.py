"""Builds the ASGI application: routes of text generation, embeddings, health and models, and middleware."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phasewise.serving.http import errors
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.answers.openai_objects import ChatWriter, CompletionWriter
from phasewise.serving.http.errors import naming, unknown_model
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.models.served_models import ListedModel, ServedModels
from phasewise.serving.http.monitoring.access_log import AccessLog
from phasewise.serving.http.monitoring.metrics import Metrics
from phasewise.serving.http.requests.body import BodyReader
from phasewise.serving.http.requests.chat_schemas import ChatRequest, TokenizeRequest
from phasewise.serving.http.requests.request_threads import Preparation
from phasewise.serving.http.requests.request_to_messages import check_token_ids, control_texts, tokenized
from phasewise.serving.http.requests.schemas import CompletionRequest, DetokenizeRequest
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.routes.batches import add_batches
from phasewise.serving.http.routes.embeddings import EmbeddingModel, EmbeddingRoutes
from phasewise.serving.http.routes.embeddings import add_routes as add_embedding_routes
from phasewise.serving.http.routes.generation_service import GenerationService
from phasewise.serving.http.routes.messages import add_messages
from phasewise.serving.http.routes.middleware import ApiKeys, RecordRequests, RequireKey
from phasewise.serving.http.routes.ollama import add_ollama
from phasewise.serving.http.routes.openapi import OPEN_PATHS, Json, Routes, add_page, document
from phasewise.serving.http.routes.responses import add_responses
from phasewise.serving.http.transport.server import Lifecycle

_EXPOSED = ("X-Request-Id", "X-Ignored-Fields", "X-Clamped-Max-Tokens", "Retry-After")


@dataclass(frozen=True)
class ServerContext:
    """Settings of the application. `cors_origins`: pages of these origins may call it; `*`: any."""

    cors_origins: tuple[str, ...] = ()
    log: AccessLog | None = None
    page: bool = False
    """True if there is a page at `/`."""


@dataclass(frozen=True)
class TextGeneration:
    """The models that generate text, the engine client that answers for them, and their batches."""

    models: ServedModels
    client: EngineClient
    batches: BatchRunner | None = None


def create_app(
    limits: HttpLimits,
    life: Lifecycle,
    metrics: Metrics,
    surroundings: ServerContext = ServerContext(),
    generation: TextGeneration | None = None,
    embeddings: EmbeddingModel | None = None,
) -> Starlette:
    """Build the application of a server that generates text, embeds, or does both. Clients must be attached
    to the event loop that runs it. `app.state.bodies`: reads bodies. `app.state.keys`: its API keys."""
    routes, keys = Routes(), ApiKeys(limits.api_keys)
    bodies = BodyReader(limits.max_body_bytes, limits.max_unfinished_bytes)
    _add_health(routes, life, metrics)
    if generation is not None:
        generation.client.observe(metrics)
        service = GenerationService(generation.models, generation.client, bodies, Preparation(), life)
        for add in (_add_completions, add_responses, add_messages, add_ollama, _add_tokens):
            add(routes, service)
        if surroundings.page:
            add_page(routes)
        if generation.batches is not None:
            add_batches(routes, generation.batches, bodies)
    if embeddings is not None:
        generates = None if generation is None else generation.models.generates
        own = EmbeddingRoutes(embeddings, bodies, life, limits.max_response_bytes, generates)
        add_embedding_routes(routes, own)
    _add_models(routes, generation, embeddings)
    layers = _layers(limits, metrics, surroundings, keys, routes)
    app = Starlette(routes=routes, middleware=layers, exception_handlers=errors.handlers(metrics.refused))
    app.router.redirect_slashes = False
    app.state.keys, app.state.bodies = keys, bodies
    return app


def _layers(
    limits: HttpLimits, metrics: Metrics, surroundings: ServerContext, keys: ApiKeys, routes: Routes
) -> list[Middleware]:
    """The middleware of every request, outermost first."""
    name_of = partial(_name_of, routes.paths)
    hosts, log = limits.allowed_hosts, surroundings.log
    layers = [Middleware(RecordRequests, log=log, metrics=metrics, name_of=name_of, hosts=hosts)]
    if surroundings.cors_origins:  # before keys: a browser asks without one whether it may ask
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=surroundings.cors_origins,
                allow_methods=("GET", "POST", "HEAD", "DELETE"),
                allow_headers=("*",),
                expose_headers=_EXPOSED,
            )
        )
    if limits.api_keys:
        pages = OPEN_PATHS if surroundings.page else frozenset()
        layers.append(Middleware(RequireKey, keys=keys, metrics=metrics, also_open=pages))
    return layers


def _name_of(paths: frozenset[str], path: str) -> str:
    """A path's name in counters and the log: ids are replaced, and unknown paths are `other`."""
    for place in ("/v1/responses/", "/v1/files/", "/v1/batches/"):
        if path.startswith(place):
            return f"{place}ID"
    return path if path in paths or path in OPEN_PATHS else "other"


def _add_health(routes: Routes, life: Lifecycle, metrics: Metrics) -> None:
    @routes.add("/health", "GET")
    async def health(_request: Request) -> JSONResponse:
        """200 while the engine can answer, now or once its ranks are there again; else restart the server."""
        alive = life.is_healthy
        return JSONResponse({"status": "ok" if alive else "engine stopped"}, 200 if alive else 503)

    @routes.add("/ready", "GET")
    async def ready(_request: Request) -> JSONResponse:
        """200 while requests should be sent here; 503 while starting, stopping, or replacing ranks.
        `threads`: number for each phase, where the engine follows the cores that it may use."""
        told: dict[str, Any] = {"status": life.state}
        if threads := metrics.threads():
            told["threads"] = dict(threads)
        return JSONResponse(told, 200 if life.is_ready else 503)

    one_at_a_time = asyncio.Lock()

    @routes.add("/metrics", "GET")
    async def prometheus(_request: Request) -> Response:
        """Metrics in Prometheus's text format."""
        async with one_at_a_time:
            await asyncio.sleep(0)  # it takes milliseconds: what others ask is answered between two of them
            return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    told = cache(lambda: document(routes))  # tens of milliseconds, and all routes are there by then

    @routes.add("/openapi.json", "GET")
    async def openapi(_request: Request) -> Json:
        """The OpenAPI document."""
        return told()


def _add_models(routes: Routes, generation: TextGeneration | None, embeddings: EmbeddingModel | None) -> None:
    async def served() -> list[ListedModel | EmbeddingModel]:
        generating = [] if generation is None else await generation.models.listed()
        return [*generating, *(() if embeddings is None else (embeddings,))]

    @routes.add("/v1/models", "GET")
    async def list_models(_request: Request) -> Json:
        """The models that are served."""
        return {"object": "list", "data": [model.card() for model in await served()]}

    @routes.add("/v1/models/{name:path}", "GET")
    async def show_model(_request: Request, name: str) -> Json:
        """The model, by its id or by the name it was started with."""
        models = await served()
        for model in models:
            if name in model.names:
                return model.card()
        raise unknown_model(name, " and ".join(model.names[0] for model in models))


def _add_completions(routes: Routes, service: GenerationService) -> None:
    @routes.add("/v1/completions", "POST", CompletionRequest)
    async def completions(request: Request) -> Response:
        """Continue a text, or several."""
        body = await service.read(request, CompletionRequest)
        model = await service.models.hold(request, body.model)
        return await service.answer(request, body, model, lambda reply, _: CompletionWriter(reply, body))

    @routes.add("/v1/chat/completions", "POST", ChatRequest)
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = await service.read(request, ChatRequest)
        model = await service.models.hold(request, body.model)
        with naming({"prompt": "messages"}):
            return await service.answer(request, body, model, partial(ChatWriter, n_top=body.prompt_logprobs))


def _add_tokens(routes: Routes, service: GenerationService) -> None:
    @routes.add("/tokenize", "POST", TokenizeRequest)
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation as the model's template writes it out."""
        body = await service.read(request, TokenizeRequest)
        model = await service.models.hold(request, body.model)
        make = partial(tokenized, body, model)
        tokens = await service.preparation.tokenize(request, make, is_text=body.messages is None)
        return Response(tokens, media_type="application/json")

    @routes.add("/tokenizer_info", "GET", query=("model",))
    async def tokenizer_info(request: Request) -> Json:
        """The control tokens that a prompt's text can spell; without a model of the first one."""
        return control_texts(await service.models.hold(request, request.query_params.get("model")))

    @routes.add("/detokenize", "POST", DetokenizeRequest)
    async def detokenize(request: Request) -> Json:
        """The text that tokens spell, control tokens included."""
        body = await service.read(request, DetokenizeRequest)
        model = await service.models.hold(request, body.model)
        check_token_ids(body.tokens, model)
        return {"prompt": b"".join(map(model.piece, body.tokens)).decode("utf-8", "replace")}
