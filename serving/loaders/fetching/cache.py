"""The cache directory: which models lie in it as files, which packed from them, and what may go."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phasewise._files import read_file
from phasewise._json import read_json
from phasewise._words import meant
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.fetching.hub import MOST_WHOLE_BYTES
from phasewise.serving.loaders.fetching.registry import KNOWN_ON_HUB, TEMPORARY
from phasewise.serving.loaders.packed_file import STALE_S, read_head


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
    """The files that went, or would go."""

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
    """Remove a fetched model and what was packed from it, or only the latter. ModelError if there is neither.

    A file of the user's own is not removed, only what was packed from it.
    """
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

    all_packed: every packed file as well; the next start of a model makes its own anew.
    """
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
