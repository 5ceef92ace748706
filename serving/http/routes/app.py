"""The routes. JSON in, messages to the engine, pieces of answers out; the scheduler is never touched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from phasewise.serving.embedding.client import EmbeddingClient
from phasewise.serving.embedding.metrics import EmbeddingMetrics
from phasewise.serving.http import errors
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.answers.last_answers import ResponseStore
from phasewise.serving.http.answers.openai_objects import (
    ChatRendering,
    CompletionRendering,
    Form,
)
from phasewise.serving.http.answers.response_events import Responding, ResponseEvents, whole
from phasewise.serving.http.answers.scoring import Scoring, echoes_of
from phasewise.serving.http.errors import naming, unknown_model
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.lifecycle import Lifecycle
from phasewise.serving.http.models.served_models import ServedModels
from phasewise.serving.http.models.while_loading import HoldModels
from phasewise.serving.http.monitoring.access_log import AccessLog, NameRequests
from phasewise.serving.http.monitoring.live import MachineFacts
from phasewise.serving.http.monitoring.metrics import Metrics
from phasewise.serving.http.requests.body import BodyReader
from phasewise.serving.http.requests.calls import reading_of
from phasewise.serving.http.requests.chat_schemas import ChatRequest, TokenizeRequest
from phasewise.serving.http.requests.request_threads import Preparation
from phasewise.serving.http.requests.request_to_messages import (
    chat_requests,
    check_token_ids,
    completion_requests,
    control_texts,
    tokenized,
)
from phasewise.serving.http.requests.response_schemas import (
    ResponsesRequest,
    chat_of,
    messages_of,
    namespaces_of,
)
from phasewise.serving.http.requests.schemas import CompletionRequest, DetokenizeRequest, Strict
from phasewise.serving.http.routes import openapi
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.routes.batches import PATHS as BATCH_PATHS
from phasewise.serving.http.routes.batches import add_batches
from phasewise.serving.http.routes.embeddings import PATHS as EMBEDDING_PATHS
from phasewise.serving.http.routes.embeddings import EmbeddingModel, EmbeddingRoutes
from phasewise.serving.http.routes.embeddings import add_routes as add_embedding_routes
from phasewise.serving.http.routes.generation_service import GenerationService, reply_of, response_id_of
from phasewise.serving.http.routes.messages import PATHS as MESSAGE_PATHS
from phasewise.serving.http.routes.messages import add_messages
from phasewise.serving.http.routes.middleware import (
    ApiKeys,
    CheckHost,
    CountAnswers,
    NamePaths,
    RequireKey,
    client_of,
)
from phasewise.serving.http.routes.ollama import PATHS as OLLAMA_PATHS
from phasewise.serving.http.routes.ollama import add_ollama
from phasewise.serving.http.routes.page_routes import OPEN_PATHS, add_page

Body = TypeVar("Body", bound=Strict)

_PATHS = frozenset(
    {"/health", "/ready", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"}
    | {"/v1/responses", "/tokenize", "/detokenize", "/tokenizer_info", "/live", "/live/machine"}
    | MESSAGE_PATHS
    | OLLAMA_PATHS
    | BATCH_PATHS
    | EMBEDDING_PATHS
    | OPEN_PATHS
)
_IN_CHAT = {"prompt": "messages"}
_IN_RESPONSES = {
    "prompt": "input",
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""The names in these requests of the fields of the others that they are made into."""
NamedCard = tuple[tuple[str, ...], Callable[[], dict[str, Any]]]
"""The names that requests may use for a model, and what /v1/models says of it."""
Cards = Callable[[], Awaitable[list[NamedCard]]]
"""The models as they are now."""
_EXPOSED = (
    *("X-Request-Id", "X-Ignored-Fields", "X-Clamped-Max-Tokens"),
    *("X-Step-Over-TPOT", "X-Estimated-TTFT", "Retry-After"),
)


@dataclass(frozen=True)
class ServerContext:
    """The surroundings of an application's routes. `cors_origins`: pages of these may call it; `*`: any."""

    cors_origins: tuple[str, ...] = ()
    log: AccessLog | None = None
    page: MachineFacts | None = None
    """The machine in the live view of the page at `/`; None: there is no page."""


@dataclass(frozen=True)
class ServedEmbeddings:
    """An embedding model, and what embeds with it."""

    model: EmbeddingModel
    client: EmbeddingClient


@dataclass(frozen=True)
class TextGeneration:
    """The models that generate text, what answers for them, and the batches of their requests."""

    models: ServedModels
    client: EngineClient
    batches: BatchRunner | None = None


def create_app(
    limits: HttpLimits,
    life: Lifecycle,
    metrics: Metrics,
    surroundings: ServerContext = ServerContext(),
    generation: TextGeneration | None = None,
    embeddings: ServedEmbeddings | None = None,
) -> FastAPI:
    """The application of a server which generates text, embeds, or does both. Clients must be attached to the
    loop that runs it.
    """
    comes_and_goes = generation is not None and generation.models.shelf is not None
    app = _new_app(limits, life, metrics, surroundings, [Middleware(HoldModels)] if comes_and_goes else [])
    cards: list[Cards] = []
    if generation is not None:
        _add_generation(app, generation, life, metrics, surroundings)
        cards.append(_cards_of(generation.models))
    if embeddings is not None:
        generates = _nothing if generation is None else generation.models.generates
        cards.append(_add_embeddings(app, embeddings, limits, life, metrics, generates))
    _add_models(app, cards)
    openapi.describe(app, generates=generation is not None, embeds=embeddings is not None)
    return app


async def _nothing(_name: str) -> bool:
    return False


def _add_generation(
    app: FastAPI, generation: TextGeneration, life: Lifecycle, metrics: Metrics, surroundings: ServerContext
) -> None:
    """Every route that generates text."""
    client, log = generation.client, surroundings.log
    client.observe(metrics)
    if log is not None:
        client.observe(log)
    service = GenerationService(generation.models, client, app.state.bodies, Preparation(), life, log)
    _add_completions(app, service)
    _add_chat(app, service)
    _add_responses(app, service)
    add_messages(app, service)
    add_ollama(app, service)
    _add_receipts(app, service)
    _add_tokens(app, service)
    if surroundings.page is not None:
        add_page(app, client, life, surroundings.page)
    if generation.batches is not None:
        add_batches(app, generation.batches, app.state.bodies)


def _new_app(
    limits: HttpLimits,
    life: Lifecycle,
    metrics: Metrics,
    surroundings: ServerContext,
    inner: Sequence[Middleware],
) -> FastAPI:
    """With what every application has; `app.state.bodies` reads bodies, `app.state.keys` are its API keys.
    inner: layers within all others.
    """
    keys = ApiKeys(limits.api_keys)
    app = FastAPI(
        title="phasewise",
        middleware=[*_layers(limits, metrics, surroundings, keys), *inner],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app, metrics.refused)
    _add_health(app, life, metrics)
    app.state.keys = keys
    app.state.bodies = BodyReader(limits.max_body_bytes, limits.max_unfinished_bytes)
    return app


def _add_embeddings(
    app: FastAPI,
    embeddings: ServedEmbeddings,
    limits: HttpLimits,
    life: Lifecycle,
    metrics: Metrics,
    generates: Callable[[str], Awaitable[bool]],
) -> Cards:
    """The model's names and card. generates: True for the name of a model beside it that generates text."""
    metrics.registry.register(EmbeddingMetrics(embeddings.client.lanes))
    routes = EmbeddingRoutes(
        embeddings.model, embeddings.client, app.state.bodies, life, limits.max_response_bytes, generates
    )
    add_embedding_routes(app, routes)
    model = embeddings.model

    async def cards() -> list[NamedCard]:
        return [(model.names, model.card)]

    return cards


def _layers(
    limits: HttpLimits, metrics: Metrics, surroundings: ServerContext, keys: ApiKeys
) -> list[Middleware]:
    """The layers that every request passes, the outermost first."""
    layers = [
        Middleware(NamePaths),
        Middleware(NameRequests, log=surroundings.log, name_of=_name_of),
        Middleware(CountAnswers, metrics=metrics, name_of=_name_of),
    ]
    if limits.allowed_hosts:
        layers.append(Middleware(CheckHost, hosts=limits.allowed_hosts, metrics=metrics))
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
        pages = OPEN_PATHS if surroundings.page is not None else frozenset()
        layers.append(Middleware(RequireKey, keys=keys, metrics=metrics, also_open=pages))
    return layers


def _name_of(path: str) -> str:
    """The name of a path in counts and in the log: a stranger's is not repeated."""
    for place in ("/v1/responses/", "/v1/receipts/", "/v1/files/", "/v1/batches/"):
        if path.startswith(place):
            return f"{place}ID"
    return path if path in _PATHS else "other"


def _add_health(app: FastAPI, life: Lifecycle, metrics: Metrics) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """200 while the engine can answer, now or once its ranks are there again; else restart the server."""
        alive = life.is_healthy
        return JSONResponse({"status": "ok" if alive else "engine stopped"}, 200 if alive else 503)

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        """200 while requests should be sent here; 503 while starting, stopping, or replacing ranks.

        `threads`: of each phase, where the engine follows the cores that it may use.
        """
        told: dict[str, Any] = {"status": life.state}
        if threads := metrics.threads():
            told["threads"] = dict(threads)
        return JSONResponse(told, 200 if life.is_ready else 503)

    one_at_a_time = asyncio.Lock()

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics in Prometheus's text format."""
        async with one_at_a_time:
            await asyncio.sleep(0)  # it takes milliseconds: what others ask is answered between two of them
            return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _cards_of(models: ServedModels) -> Cards:
    async def cards() -> list[NamedCard]:
        return [(model.names, model.card) for model in await models.listed()]

    return cards


def _add_models(app: FastAPI, sources: Sequence[Cards]) -> None:
    """sources: of the models' names and cards."""

    async def named_cards() -> list[NamedCard]:
        return [card for cards in sources for card in await cards()]

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The models that are served."""
        return {"object": "list", "data": [card() for _, card in await named_cards()]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        """The model, by its id or by the name it was started with."""
        cards = await named_cards()
        for names, card in cards:
            if name in names:
                return card()
        raise unknown_model(name, " and ".join(names[0] for names, _ in cards))


def _add_completions(app: FastAPI, service: GenerationService) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue a text, or several."""
        body = await service.read(request, CompletionRequest)
        model = await service.models.hold(request, body.model, streams=bool(body.stream))
        requests, facts = await service.preparation.prepare(request, body, completion_requests, model)
        scoring = Scoring(body.prompt_logprobs, echoes_of(body, requests, model))
        rendering = CompletionRendering(response_id_of(requests), model, scoring)
        reply = service.with_receipts(reply_of(body, requests, facts, rendering, model), model, request)
        return await service.answer(reply, request)


def _add_chat(app: FastAPI, service: GenerationService) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = await service.read(request, ChatRequest)
        model = await service.models.hold(request, body.model, streams=bool(body.stream))
        with naming(_IN_CHAT):
            requests, facts = await service.preparation.prepare(request, body, chat_requests, model)
            reading = reading_of(body, model, requests[0])
            scoring = Scoring(body.prompt_logprobs)
            rendering = ChatRendering(response_id_of(requests), model, reading, scoring)
            reply = service.with_receipts(reply_of(body, requests, facts, rendering, model), model, request)
            return await service.answer(reply, request)


def _add_responses(app: FastAPI, service: GenerationService) -> None:
    store = ResponseStore()

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        """Answer a conversation, perhaps one that was stored here."""
        body = await service.read(request, ResponsesRequest)
        client = client_of(request.scope).name
        previous = body.previous_response_id
        before = [] if previous is None else store.conversation(client, previous)
        model = await service.models.hold(request, body.model, streams=bool(body.stream))
        with naming(_IN_RESPONSES):
            chat = await service.bodies.convert(request, lambda: chat_of(body, before))
            requests, facts = await service.preparation.prepare(request, chat, chat_requests, model)
        (asked,) = requests
        response_id = f"resp_{asked.request_id.split('-')[1]}"

        def keep(answer: dict[str, Any], written: str) -> None:
            if body.store is not False:
                store.put(client, response_id, [*before, *messages_of(body.input), answer], written)

        responding = Responding(
            model_id=model.model_id,
            n_prompt=len(asked.prompt_token_ids),
            reading=reading_of(chat, model, asked),
            response_id=response_id,
            body=body,
            sampling={"temperature": asked.sampling.temperature, "top_p": asked.sampling.top_p},
            system_fingerprint=model.system_fingerprint,
            count=lambda text: len(model.encode(text, False)),
            keep=keep,
            namespaces=namespaces_of(body),
        )
        form = Form(partial(whole, responding), partial(ResponseEvents, responding))
        reply = replace(reply_of(chat, requests, facts, ChatRendering("", model), model), form=form)
        with naming(_IN_RESPONSES):
            return await service.answer(reply, request)

    @app.get("/v1/responses/{response_id}")
    async def show_response(request: Request, response_id: str) -> Response:
        """A response that is stored here."""
        written = store.stored(client_of(request.scope).name, response_id).written
        return Response(written, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def forget_response(request: Request, response_id: str) -> dict[str, Any]:
        """Store it no longer."""
        client = client_of(request.scope).name
        store.stored(client, response_id)
        store.drop(client, response_id)
        return {"id": response_id, "object": "response", "deleted": True}


def _add_receipts(app: FastAPI, service: GenerationService) -> None:
    @app.get("/v1/receipts/{answer_id}")
    async def show_receipts(request: Request, answer_id: str) -> Response:
        """The receipts of an answer, one for each of its choices."""
        written = service.receipts.receipts(client_of(request.scope).name, answer_id)
        return Response(written, media_type="application/json")


def _add_tokens(app: FastAPI, service: GenerationService) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation as the model's template writes it out."""
        body = await service.read(request, TokenizeRequest)
        model = await service.models.hold(request, body.model)
        make = partial(tokenized, body, model)
        tokens = await service.preparation.tokenize(request, make, is_text=body.messages is None)
        return Response(tokens, media_type="application/json")

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, str | None]:
        """The control tokens that a prompt's text can spell; without a model of the first one."""
        return control_texts(await service.models.hold(request, model))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        """The text that tokens spell, control tokens included."""
        body = await service.read(request, DetokenizeRequest)
        model = await service.models.hold(request, body.model)
        check_token_ids(body.tokens, model)
        return {"prompt": b"".join(map(model.piece, body.tokens)).decode("utf-8", "replace")}
