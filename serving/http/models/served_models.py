"""The models of one server, as its routes see them: kept from start to end, or loaded when they are named."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import Request

from phasewise.serving.http.answers.signs_of_life import minds_signs
from phasewise.serving.http.errors import ApiError, bad_request, other_purpose, unknown_model
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.models.model_shelf import ModelShelf, ModelState
from phasewise.serving.http.models.while_loading import while_loading
from phasewise.serving.http.monitoring.access_log import note_model
from phasewise.serving.http.routes.embeddings import EmbeddingModel

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


class Models(Protocol):
    """The models that requests may name."""

    async def hold(self, request: Request, name: str | None, *, streams: bool = False) -> ServedModel:
        """The one that a request names, until its answer is sent. ApiError where there is none.

        streams: its answer is a stream, which has signs of life while the model is loaded.
        """
        ...

    async def listed(self) -> Sequence[ListedModel]:
        """All of them."""
        ...

    async def facts(self, model: ListedModel) -> ModelFacts:
        """Facts of one that is listed, whether it is loaded or not."""
        ...


class ResidentModels:
    """Models that stay. embedder: served beside, for other routes."""

    def __init__(self, models: Sequence[ServedModel], embedder: EmbeddingModel | None = None) -> None:
        self._models = tuple(models)
        self._embedder = embedder

    async def hold(self, request: Request, name: str | None, *, streams: bool = False) -> ServedModel:
        """Without a name the first."""
        model = next((model for model in self._models if name is None or name in model.names), None)
        if model is None and self._embedder is not None and name in self._embedder.names:
            path = "/v1/rerank" if self._embedder.scores else "/v1/embeddings"
            raise other_purpose(str(name), "makes vectors and no text", path)
        if model is None:
            raise unknown_model(str(name), ", ".join(model.model_id for model in self._models))
        note_model(request.scope, model.engine_id, model.adapter)
        return model

    async def listed(self) -> Sequence[ListedModel]:
        return [
            ListedModel(model.model_id, model.names, model.created_s, model.facts.n_bytes, None, model)
            for model in self._models
        ]

    async def facts(self, model: ListedModel) -> ModelFacts:
        assert model.served is not None, "it stays"
        return model.served.facts


class OnDemandModels:
    """Models of a folder. every_s: between signs of life of streams."""

    def __init__(self, shelf: ModelShelf, every_s: float) -> None:
        self._shelf = shelf
        self._every_s = every_s

    async def hold(self, request: Request, name: str | None, *, streams: bool = False) -> ServedModel:
        """Without a name the one that there is."""
        if name is None:
            name = await self._only_name()
        own = while_loading(request)
        waits = request.headers.get(LOADING_HEADER) != "refuse"
        every_s = self._every_s if streams and not minds_signs(request) else None
        try:
            model = await own.wait(request, self._held(name, own.holds, waits), every_s)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                note_model(request.scope, name)
            raise
        note_model(request.scope, name)
        return model

    async def _held(self, name: str, holds: Any, waits: bool) -> ServedModel:
        model = await self._shelf.hold(name, waits=waits)
        holds(partial(self._shelf.release, name))
        return model

    async def _only_name(self) -> str:
        names = list(await self._shelf.files())
        if len(names) != 1:
            raise bad_request(f"model: name one of {', '.join(names) or 'an empty folder'}", "model")
        return names[0]

    async def listed(self) -> Sequence[ListedModel]:
        shelf, since_s = self._shelf, time.time() - time.monotonic()
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
        return listed

    async def facts(self, model: ListedModel) -> ModelFacts:
        return await self._shelf.facts(model.model_id)
