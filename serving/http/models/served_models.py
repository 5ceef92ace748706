"""The models of one server, as its routes see them: kept from start to end, or loaded when they are named."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.requests import Request

from phasewise.serving.http.answers.signs_of_life import minds_signs
from phasewise.serving.http.errors import ApiError, bad_request, other_purpose, unknown_model
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.models.model_shelf import ModelShelf, ModelState
from phasewise.serving.http.models.while_loading import while_loading
from phasewise.serving.http.monitoring.access_log import note_model
from phasewise.serving.http.routes.embeddings import EmbeddingModel
from phasewise.serving.http.routes.middleware import client_of

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
