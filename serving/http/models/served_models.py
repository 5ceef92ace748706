"""The models of one server, as its routes see them: always in memory, or loaded on demand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.requests import Request

from phasewise.serving.http.errors import ApiError, bad_request, other_purpose, unknown_model
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.models.model_shelf import ModelShelf, ModelState
from phasewise.serving.http.monitoring.access_log import note_model, record_of
from phasewise.serving.http.requests.request_threads import while_there
from phasewise.serving.http.routes.embeddings import EmbeddingModel, card_of
from phasewise.serving.http.routes.middleware import client_of


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a listing. `served`: None if the model is not loaded. `ends_s`: Unix time at which the model
    is unloaded if unused until then; None: never, or not loaded."""

    model_id: str
    names: tuple[str, ...]
    created_s: int
    n_bytes: int
    state: ModelState | None
    served: ServedModel | None
    ends_s: float | None = None

    def card(self) -> dict[str, Any]:
        """The entry of `/v1/models`."""
        card = card_of(self.model_id, self.created_s)
        if self.state is not None:
            card["state"] = self.state
        if self.served is not None:
            card["max_model_len"] = self.served.context_length
            card["default_sampling"] = self.served.sampling.to_json()
            card["turns"] = self.served.dialect.describe()
            fingerprint = self.served.fingerprint()
            card["system_fingerprint"] = fingerprint and fingerprint.short
            card["arithmetic"] = fingerprint and fingerprint.arithmetic
            card["arithmetic_paths"] = fingerprint and fingerprint.paths
            if self.served.parent:
                card["parent"] = self.served.parent
        return card


class ServedModels:
    """The models that requests may name: `models` stay in memory, those of `shelf` are loaded on demand.
    `embedder`: an embedding model that other routes serve."""

    def __init__(
        self,
        models: Sequence[ServedModel] = (),
        shelf: ModelShelf | None = None,
        embedder: EmbeddingModel | None = None,
    ) -> None:
        self.shelf = shelf
        self._models = tuple(models)
        self._embedder = embedder

    async def hold(self, request: Request, name: str | None) -> ServedModel:
        """Hold the model that a request names until its answer is sent. Without a name: the first that stays,
        or the only one of the shelf. Raises ApiError if there is none."""
        model = next((model for model in self._models if name is None or name in model.names), None)
        if model is not None:
            note_model(request.scope, model.engine_id, model.adapter)
            return model
        if self._embedder is not None and name in self._embedder.names:
            path = "/v1/rerank" if self._embedder.scores else "/v1/embeddings"
            raise other_purpose(str(name), "makes vectors and no text", path)
        if self.shelf is None:
            raise unknown_model(str(name), ", ".join(model.model_id for model in self._models))
        return await self._hold_loaded(self.shelf, request, name)

    async def _hold_loaded(self, shelf: ModelShelf, request: Request, name: str | None) -> ServedModel:
        if name is None:
            name = await _only_name(shelf)
        base, adapter = name, ""
        if ":" in name and name not in await shelf.files():
            base, _, adapter = name.rpartition(":")

        async def held() -> ServedModel:
            model = await shelf.hold(base, in_shadow=client_of(request.scope).in_shadow)
            record_of(request.scope).releases.append(partial(shelf.release, base))
            return model

        try:
            model = await while_there(request, held())
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
        """True if a model of this name generates text on this server."""
        if any(name in model.names for model in self._models):
            return True
        return self.shelf is not None and name in await self.shelf.files()

    async def listed(self) -> Sequence[ListedModel]:
        staying = [
            ListedModel(model.model_id, model.names, model.created_s, model.facts.n_bytes, None, model)
            for model in self._models
        ]
        return staying if self.shelf is None else [*staying, *await _listed(self.shelf)]

    async def facts(self, model: ListedModel) -> ModelFacts:
        """Facts about a listed model, loaded or not."""
        if model.served is not None:
            return model.served.facts
        assert self.shelf is not None, "others stay"
        return await self.shelf.facts(model.model_id)


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
