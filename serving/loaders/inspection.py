"""Facts about a model without packing it; and the cache directory: which models lie in it as files, which
packed from them, and what may go."""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phasewise._files import read_file
from phasewise._json import read_json
from phasewise._words import meant
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.chunks import kept_numbers
from phasewise.serving.loaders.fetching import hub
from phasewise.serving.loaders.fetching.hub import MOST_WHOLE_BYTES
from phasewise.serving.loaders.fetching.registry import (
    KNOWN,
    KNOWN_ON_HUB,
    TEMPORARY,
    HubModel,
    KnownModel,
    is_here,
    known_path,
)
from phasewise.serving.loaders.layout import has_bias, plan_weights
from phasewise.serving.loaders.packed_file import STALE_S, read_head
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.loaders.storage import break_even, bytes_share, can_be_sparse
from phasewise.serving.models.config_json import config_to_json
from phasewise.serving.models.packed_model import FORMATS, ModelConfig


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that was fetched. `format` is told by its files: GGUF or safetensors."""

    name: str
    path: Path
    format: str
    n_bytes: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class PackedCache:
    """A packed file: what starts map instead of reading the model again."""

    name: str
    path: Path
    format: str
    n_bytes: int
    source: Path | None
    """The model that it was made from; None where the file does not say, and is of no use."""
    content_hash: str

    @property
    def is_orphan(self) -> bool:
        """True if no start will use it any more: what it was made from is not there."""
        return self.source is None or not self.source.exists()


@dataclass(frozen=True, slots=True)
class Removed:
    """A file or directory that was removed, or would be."""

    path: Path
    n_bytes: int
    why: str


def stored_models(root: Path) -> list[StoredModel]:
    """Every model that was fetched into the cache, by name."""
    return sorted(_stored(root), key=lambda model: model.name)


def _stored(root: Path) -> Iterator[StoredModel]:
    for folder in _folders(root / "models"):
        if folder.name != "hub":
            yield _stored_in(folder, folder.name, True)
    for folder in _folders(root / "models" / "hub"):
        try:
            name = str(read_json(read_file(folder / ".whole", MOST_WHOLE_BYTES))["name"])
            yield _stored_in(folder, name, True)
        except (OSError, ValueError, KeyError, TypeError):
            yield _stored_in(folder, folder.name.replace("--", "/", 1).replace("@", ":"), False)


def _folders(place: Path) -> list[Path]:
    return (
        sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink())
        if place.is_dir()
        else []
    )


def _stored_in(folder: Path, name: str, is_whole: bool) -> StoredModel:
    gguf, safetensors = sorted(folder.glob("*.gguf")), list(folder.glob("*.safetensors"))
    kind = "GGUF" if gguf else "safetensors" if safetensors else "nothing"
    return StoredModel(name, gguf[0] if gguf else folder, kind, _bytes_under(folder), is_whole)


def _bytes_under(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(_bytes_under(inner) for inner in path.iterdir())
    return path.lstat().st_size


def packed_caches(root: Path) -> list[PackedCache]:
    """Every packed file, largest first; also those that cannot be read."""
    caches = []
    for path in (root / "packed").glob("*.packed"):
        head = read_head(path)
        n_bytes = path.stat().st_size
        if head is None:
            caches.append(PackedCache(path.name, path, "?", n_bytes, None, ""))
        else:
            source = Path(str(head["source"]))
            caches.append(
                PackedCache(head["name"], path, head["format"], n_bytes, source, head["content_hash"])
            )
    return sorted(caches, key=lambda cache: (-cache.n_bytes, cache.name))


def remove(name: str, root: Path, *, packed_only: bool = False) -> list[Removed]:
    """Remove a fetched model and what was packed from it, or only the latter. Raises ModelError if both are
    absent. A file of the user's own is not removed, only what was packed from it."""
    wanted = KNOWN_ON_HUB[name].ref if name in KNOWN_ON_HUB else name
    stored = [model for model in stored_models(root) if model.name in (name, wanted)]
    own = _resolved(name)
    packed = [
        cache
        for cache in packed_caches(root)
        if cache.name in (name, wanted)
        or (cache.source is not None and (cache.source == own or _is_of(cache.source, stored)))
    ]
    if not stored and not packed:
        raise ModelError(
            f"nothing in {root} is called {name!r:.200}: phasewise models list shows what is there"
            f"{meant(name, [model.name for model in stored_models(root)])}"
        )
    removed = [Removed(cache.path, cache.n_bytes, "packed") for cache in packed]
    if not packed_only:
        removed += [Removed(_folder(model), model.n_bytes, "model") for model in stored]
    _take_away(removed)
    return removed


def _resolved(name: str) -> Path | None:
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        return None


def _folder(model: StoredModel) -> Path:
    return model.path if model.path.is_dir() else model.path.parent


def _is_of(source: Path, stored: list[StoredModel]) -> bool:
    return any(source == model.path or _folder(model) in (source, *source.parents) for model in stored)


def prune(root: Path, *, all_packed: bool = False, dry_run: bool = False) -> list[Removed]:
    """Remove what no start will use: packed files without their model, parts of downloads, left-over files.

    all_packed: every packed file as well; the next start of a model makes its own anew."""
    removed = [
        Removed(cache.path, cache.n_bytes, "packed; its model is gone" if cache.is_orphan else "packed")
        for cache in packed_caches(root)
        if all_packed or cache.is_orphan
    ]
    removed += [
        Removed(path, _bytes_under(path), "part of a download") for path in (root / "models").rglob(".*.part")
    ]
    left_over = [*(root / "packed").glob(".*"), *(root / "models").rglob(f"{TEMPORARY}*")]
    removed += [
        Removed(path, _bytes_under(path), "left by a run that was killed")
        for path in left_over
        if time.time() - path.lstat().st_mtime > STALE_S
    ]
    if not dry_run:
        _take_away(removed)
    return removed


def _take_away(removed: list[Removed]) -> None:
    for removal in removed:
        try:
            if removal.path.is_dir() and not removal.path.is_symlink():
                shutil.rmtree(removal.path)
            else:
                removal.path.unlink(missing_ok=True)
        except OSError as error:
            raise ModelError(f"{removal.path} cannot be removed: {error.strerror}") from error


@dataclass(frozen=True)
class TensorType:
    """All tensors of one type of the file."""

    type_name: str
    count: int
    file_bytes: int


@dataclass(frozen=True)
class HeadFacts:
    """Sizes of a draft head, without what it shares with its model."""

    parameters: int
    format_bytes: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """A model's shape and sizes. `format_bytes`: of packed weights, by user-facing format. `state_bytes`: of
    a sequence's state beside keys and values. `head`: None without a supported draft head. `turns`: the forms
    in which the chat template writes thoughts and calls; None without a template."""

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
    from phasewise.serving.text.chat_template import Conversations

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
    """The share of a weight's numbers that are not zero, and its bytes stored dense and sparse."""

    name: str
    n: int
    k: int
    form: str
    density: float
    dense_bytes: int
    sparse_bytes: int
    break_even: float
    """The share of zeros from which on the weight is stored sparse where nothing was measured."""


def densities(source: ModelSource, weight_format: str) -> list[WeightDensity]:
    """Density of every weight that can be stored sparse under a format. Reads all of them."""
    weight_densities = []
    for plan in plan_weights(source, weight_format):
        if not can_be_sparse(plan.form):
            continue
        density, dense = kept_numbers(plan) / (plan.n * plan.k), plan.nbytes
        sparse_bytes = round(dense * bytes_share(plan.form, plan.n, plan.k, density))
        own = plan.form.kind, density, dense, sparse_bytes, break_even(plan.form, plan.n, plan.k)
        weight_densities.append(WeightDensity(plan.name, plan.n, plan.k, *own))
    return weight_densities


def to_json(inspection: Inspection) -> dict[str, Any]:
    return {**asdict(inspection), "path": str(inspection.path), "config": config_to_json(inspection.config)}


def known_models(root: Path) -> list[dict[str, Any]]:
    """The registry as JSON values. `path`: None for absent models. `file_bytes`: rounded for hub models."""
    models: list[tuple[KnownModel | HubModel, Path | None, int]] = [
        (model, known_path(model, root) if is_here(model, root) else None, model.file_bytes)
        for model in KNOWN.values()
    ]
    models += [(model, hub.here(model.ref, root), model.about_bytes) for model in KNOWN_ON_HUB.values()]
    return [
        {
            **{key: getattr(model, key) for key in ("name", "about", "licence")},
            "file_bytes": n_bytes,
            "path": None if path is None else str(path),
            "is_rounded": isinstance(model, HubModel),
        }
        for model, path, n_bytes in models
    ]


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
