"""The models of one server, as its routes see them: kept from start to end, or loaded when they are named."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasewise.serving.http.answers.openai_objects import COMMENT, EVENT_STREAM, JSON_LINES, PING, SPACE
from phasewise.serving.http.answers.send_answer import minds_signs
from phasewise.serving.http.errors import ApiError, bad_request, other_purpose, unknown_model
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.models.model_shelf import ModelShelf, ModelState
from phasewise.serving.http.monitoring.access_log import note_model
from phasewise.serving.http.requests.request_threads import while_there
from phasewise.serving.http.routes.embeddings import EmbeddingModel
from phasewise.serving.http.routes.middleware import client_of

_PLACE = "phasewise.while_loading"
"""The place in an ASGI scope of its `WhileLoading`."""

Made = TypeVar("Made")


class WhileLoading:
    """One request, between its model and its answer."""

    def __init__(self, path: str, send: Send) -> None:
        self.keep_s: float | None = None
        """The time that its model shall stay unused; None: the server's."""
        self._send = send
        self._is_messages = path.startswith("/v1/messages")
        self._is_lines = path.startswith("/api/")
        self._has_begun = False
        self._failure = bytearray()
        self._has_failed = False
        self._releases: list[Callable[[float | None], None]] = []

    def holds(self, release: Callable[[float | None], None]) -> None:
        """`release` is called at the end, with `keep_s`."""
        self._releases.append(release)

    def end(self) -> None:
        for release in self._releases:
            release(self.keep_s)
        self._releases.clear()

    async def wait(self, request: Request, work: Awaitable[Made], every_s: float | None) -> Made:
        """The result of `work`, a sign of life for every `every_s` before it; None: no signs. ClientLeft."""
        making = asyncio.ensure_future(while_there(request, work))
        try:
            while not making.done():
                await asyncio.wait((making,), timeout=every_s)
                if not making.done():
                    await self._sign()
            return await making
        finally:
            making.cancel()

    async def send(self, message: Message) -> None:
        """A message of the route."""
        if not self._has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._has_failed = message["status"] != 200
        elif not self._has_failed:
            await self._send(message)
        else:
            self._failure += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send({"type": "http.response.body", "body": self._told(), "more_body": False})

    async def _sign(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            media_type = JSON_LINES if self._is_lines else f"{EVENT_STREAM}; charset=utf-8"
            headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        sign = SPACE if self._is_lines else PING if self._is_messages else COMMENT
        await self._send({"type": "http.response.body", "body": sign, "more_body": True})

    def _told(self) -> bytes:
        """The refusal, as a stream of this API has it."""
        failure = json.dumps(json.loads(self._failure), ensure_ascii=False)
        if self._is_lines:
            return f"{failure}\n".encode()
        event = "event: error\n" if self._is_messages else ""
        return f"{event}data: {failure}\n\n".encode()


def while_loading(request: Request) -> WhileLoading:
    """That of this request."""
    own: WhileLoading = request.scope[_PLACE]
    return own


def keep_for(request: Request, keep_s: float | None) -> None:
    """Its model shall stay unused for this time; None: for the server's. Models that are kept just stay."""
    own: WhileLoading | None = request.scope.get(_PLACE)
    if own is not None:
        own.keep_s = keep_s


class HoldModels:
    """Middleware: each request may hold models until its answer is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = WhileLoading(scope["path"], send)
        try:
            await self._app({**scope, _PLACE: own}, receive, own.send)
        finally:
            own.end()


LOADING_HEADER = "X-Model-Loading"
"""`refuse`: a request whose model is not loaded gets 503 at once, and loading begins."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a listing. `served`: None where it is not loaded. `ends_s`: Unix time when it goes unless it
    is used; None: it stays, or is not here.
    """

    model_id: str
    names: tuple[str, ...]
    created_s: int
    n_bytes: int
    state: ModelState | None
    served: ServedModel | None
    ends_s: float | None = None

    def card(self) -> dict[str, Any]:
        """As /v1/models lists it."""
        card: dict[str, Any] = {
            "id": self.model_id,
            "object": "model",
            "created": self.created_s,
            "owned_by": "phasewise",
        }
        if self.state is not None:
            card["state"] = self.state
        if self.served is not None:
            card["max_model_len"] = self.served.context_length
            card["default_sampling"] = self.served.sampling.to_json()
            card["turns"] = self.served.dialect.describe()
            card["system_fingerprint"] = self.served.system_fingerprint
            card["arithmetic"] = self.served.arithmetic
            card["arithmetic_paths"] = self.served.arithmetic_paths
            if self.served.parent:
                card["parent"] = self.served.parent
        return card


class ServedModels:
    """The models that requests may name: those that stay, and those of a `shelf`, which come and go.

    every_s: between signs of life of streams. embedder: served beside, for other routes.
    """

    def __init__(
        self,
        models: Sequence[ServedModel] = (),
        shelf: ModelShelf | None = None,
        every_s: float = 0.0,
        embedder: EmbeddingModel | None = None,
    ) -> None:
        self.shelf = shelf
        self._models = tuple(models)
        self._every_s = every_s
        self._embedder = embedder

    async def hold(self, request: Request, name: str | None, *, streams: bool = False) -> ServedModel:
        """The one that a request names, until its answer is sent; without a name the first that stays, or the
        only one that there is. ApiError where there is none.

        streams: its answer is a stream, which has signs of life while the model is loaded.
        """
        model = next((model for model in self._models if name is None or name in model.names), None)
        if model is not None:
            note_model(request.scope, model.engine_id, model.adapter)
            return model
        if self._embedder is not None and name in self._embedder.names:
            path = "/v1/rerank" if self._embedder.scores else "/v1/embeddings"
            raise other_purpose(str(name), "makes vectors and no text", path)
        if self.shelf is None:
            raise unknown_model(str(name), ", ".join(model.model_id for model in self._models))
        return await self._hold_loaded(self.shelf, request, name, streams=streams)

    async def _hold_loaded(
        self, shelf: ModelShelf, request: Request, name: str | None, *, streams: bool
    ) -> ServedModel:
        if name is None:
            name = await _only_name(shelf)
        own = while_loading(request)
        waits, in_shadow = request.headers.get(LOADING_HEADER) != "refuse", client_of(request.scope).in_shadow
        base, adapter = name, ""
        if ":" in name and name not in await shelf.files():
            base, _, adapter = name.rpartition(":")
        held = shelf.hold(base, waits=waits, in_shadow=in_shadow)
        every_s = self._every_s if streams and not minds_signs(request) else None
        try:
            model = await own.wait(request, _held(held, partial(shelf.release, base), own.holds), every_s)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                note_model(request.scope, base)
            raise
        if adapter:
            adapted = shelf.adapted(base)
            model = next((own for own in adapted if own.adapter == adapter), model)
            if not model.adapter:
                raise unknown_model(name, ", ".join(own.model_id for own in (model, *adapted)))
        note_model(request.scope, model.engine_id, model.adapter)
        return model

    async def generates(self, name: str) -> bool:
        """True if a model of this name makes text here."""
        if any(name in model.names for model in self._models):
            return True
        return self.shelf is not None and name in await self.shelf.files()

    async def listed(self) -> Sequence[ListedModel]:
        """All of them."""
        staying = [
            ListedModel(model.model_id, model.names, model.created_s, model.facts.n_bytes, None, model)
            for model in self._models
        ]
        return staying if self.shelf is None else [*staying, *await _listed(self.shelf)]

    async def facts(self, model: ListedModel) -> ModelFacts:
        """Facts of one that is listed, whether it is loaded or not."""
        if model.served is not None:
            return model.served.facts
        assert self.shelf is not None, "others stay"
        return await self.shelf.facts(model.model_id)


async def _held(
    held: Awaitable[ServedModel],
    release: Callable[[float | None], None],
    holds: Callable[[Callable[[float | None], None]], None],
) -> ServedModel:
    model = await held
    holds(release)
    return model


async def _only_name(shelf: ModelShelf) -> str:
    names = list(await shelf.files())
    if len(names) != 1:
        raise bad_request(f"model: name one of {', '.join(names) or 'an empty folder'}", "model")
    return names[0]


async def _listed(shelf: ModelShelf) -> Sequence[ListedModel]:
    since_s = time.time() - time.monotonic()
    listed = []
    for name, file in (await shelf.files()).items():
        resident = shelf.room.residents.get(name)
        served = shelf.served(name)
        n_bytes = file.n_bytes if resident is None else resident.n_bytes
        ends_s = None
        if resident is not None and resident.used_s + resident.keep_s < float("inf"):
            ends_s = since_s + max(resident.used_s + resident.keep_s, time.monotonic())
        state = shelf.state(name)
        listed.append(ListedModel(name, (name,), file.modified_s, n_bytes, state, served, ends_s))
        listed += [
            ListedModel(own.model_id, own.names, file.modified_s, n_bytes, state, own, ends_s)
            for own in shelf.adapted(name)
        ]
    return listed
