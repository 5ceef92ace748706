"""Facts about a model without packing it, and about the cache without opening a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phasewise.serving.loaders.fetching import hub
from phasewise.serving.loaders.fetching.cache import packed_caches, stored_models
from phasewise.serving.loaders.fetching.registry import KNOWN, KNOWN_ON_HUB, is_here, known_path
from phasewise.serving.loaders.layout import has_bias, plan_weights
from phasewise.serving.loaders.packed_file import kept_numbers
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.loaders.storage import break_even, bytes_share, can_be_sparse
from phasewise.serving.models.config_json import config_to_json
from phasewise.serving.models.packed_model import FORMATS, ModelConfig


@dataclass(frozen=True)
class TensorType:
    """All tensors of one type of the file."""

    type_name: str
    count: int
    file_bytes: int


@dataclass(frozen=True)
class HeadFacts:
    """A head that drafts, without what it shares with its model."""

    parameters: int
    format_bytes: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """A model's shape and sizes. `format_bytes`: packed weights, by user-facing format. `state_bytes`: of
    each sequence, beside its keys and values; 0 where no layer keeps a state. `head`: that drafts, where the
    files have one that is read. `turns`: how its chat template writes thoughts and calls; None without one.
    """

    name: str
    path: Path
    config: ModelConfig
    tokenizer_kind: str
    turns: Mapping[str, str] | None
    has_bias: bool
    parameters: int
    tensor_types: tuple[TensorType, ...]
    format_bytes: dict[str, int]
    state_bytes: int = 0
    head: HeadFacts | None = None


def inspect_source(source: ModelSource, head: ModelSource | None = None) -> Inspection:
    """Inspect an open, checked source, and its head; reads no tensor."""
    by_type: dict[str, list[SourceTensor]] = defaultdict(list)
    for tensor in source.tensors.values():
        by_type[tensor.type_name].append(tensor)
    types = [TensorType(name, len(some), sum(t.n_bytes for t in some)) for name, some in by_type.items()]
    return Inspection(
        name=source.name,
        path=source.path,
        config=source.config,
        tokenizer_kind=source.tokenizer_kind,
        turns=None if source.chat_template is None else _turns(source.chat_template),
        has_bias=has_bias(source.tensors),
        parameters=_parameters(source),
        tensor_types=tuple(sorted(types, key=lambda kind: -kind.file_bytes)),
        format_bytes=_format_bytes(source),
        state_bytes=source.config.state_bytes,
        head=None if head is None else HeadFacts(_parameters(head), _format_bytes(head)),
    )


def _turns(chat_template: str) -> dict[str, str]:
    """Name the forms in which a template writes thoughts and calls."""
    from phasewise.serving.text.chat import Conversations

    conversations = Conversations(chat_template, {}, [])
    try:
        conversations.start()
        return conversations.turn.describe()
    finally:
        conversations.close()


def _parameters(source: ModelSource) -> int:
    return sum(math.prod(tensor.shape) for tensor in source.tensors.values())


def _format_bytes(source: ModelSource) -> dict[str, int]:
    return {name: sum(plan.nbytes for plan in plan_weights(source, name)) for name in FORMATS}


@dataclass(frozen=True)
class WeightDensity:
    """The number of a weight's numbers that are not zero, and the bytes it takes either way."""

    name: str
    n: int
    k: int
    form: str
    density: float
    dense_bytes: int
    sparse_bytes: int
    break_even: float
    """The share of zeros from which on it is stored sparse where nothing was measured."""


def densities(source: ModelSource, weight_format: str) -> list[WeightDensity]:
    """Density of every weight that can be stored sparse under a format. Reads all of them."""
    weight_densities = []
    for plan in plan_weights(source, weight_format):
        if not can_be_sparse(plan.form):
            continue
        density, dense = kept_numbers(plan) / (plan.n * plan.k), plan.nbytes
        weight_densities.append(
            WeightDensity(
                name=plan.name,
                n=plan.n,
                k=plan.k,
                form=plan.form.kind,
                density=density,
                dense_bytes=dense,
                sparse_bytes=round(dense * bytes_share(plan.form, plan.n, plan.k, density)),
                break_even=break_even(plan.form, plan.n, plan.k),
            )
        )
    return weight_densities


def to_json(inspection: Inspection) -> dict[str, Any]:
    """Plain JSON values."""
    return {**asdict(inspection), "path": str(inspection.path), "config": config_to_json(inspection.config)}


def known_models(root: Path) -> list[dict[str, Any]]:
    """The registry; `path` is None for a model that is not here. `file_bytes` of the hub's are rounded."""
    models: list[dict[str, Any]] = []
    for model in KNOWN.values():
        path = known_path(model, root) if is_here(model, root) else None
        fields = {key: getattr(model, key) for key in ("name", "about", "licence", "file_bytes")}
        models.append({**fields, "path": None if path is None else str(path), "is_rounded": False})
    for remote in KNOWN_ON_HUB.values():
        lies_at = hub.here(remote.ref, root)
        models.append(
            {
                "name": remote.name,
                "about": remote.about,
                "licence": remote.licence,
                "file_bytes": remote.about_bytes,
                "path": None if lies_at is None else str(lies_at),
                "is_rounded": True,
            }
        )
    return models


def stored(root: Path) -> list[dict[str, Any]]:
    """Every model that was fetched into the cache, as JSON values."""
    return [{**asdict(model), "path": str(model.path)} for model in stored_models(root)]


def packed_models(root: Path) -> list[dict[str, Any]]:
    """Every readable packed file in the cache, largest first, as JSON values."""
    return [
        {
            "name": cache.name,
            "format": cache.format,
            "source": str(cache.source),
            "content_hash": cache.content_hash,
            "file_bytes": cache.n_bytes,
            "path": str(cache.path),
            "is_orphan": cache.is_orphan,
        }
        for cache in packed_caches(root)
        if cache.source is not None
    ]
