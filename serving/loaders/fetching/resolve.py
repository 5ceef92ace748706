"""Names of models that a user may give, and the path on disk of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phasewise._places import cache_folder
from phasewise._words import meant
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.fetching.registry import KNOWN, KNOWN_ON_HUB, is_here, known_path, pull
from phasewise.serving.loaders.formats.gguf_file import part_paths, stem_of
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.packed_file import is_packed, read_head

KINDS_OF_NAMES = (
    ": give a .gguf file, a Hugging Face directory, a hub name (org/name)"
    " or a known name (phasewise models list)"
)
"""The end of an error about a name that resembles no known one."""

Report = Callable[[str], None]
DownloadProgress = Callable[[int, int], None]
"""Is called with bytes here and bytes in all, of all files that are fetched."""


@dataclass(frozen=True)
class Located:
    """A model on disk: a GGUF file, a Hugging Face directory or a packed file, and its name."""

    name: str
    path: Path

    def files(self) -> list[Path]:
        """Every file that the model is read from, sorted. Raises ModelError for a link out of a directory."""
        if self.path.is_dir():
            return ModelDirectory(self.path).source_files()
        return [path for path in part_paths(self.path) if path == self.path or path.exists()]


def cache_root(override: Path | None = None) -> Path:
    """`override`, or `$PHASEWISE_CACHE`, or phasewise's place in the XDG cache directory."""
    return cache_folder() if override is None else override


def locate(ref: str, root: Path, report: Report) -> Located:
    """Find `ref` on disk, fetching it where it is a known or a hub name that is not here yet."""
    if ref in KNOWN:
        here = is_here(KNOWN[ref], root)
        return Located(ref, known_path(KNOWN[ref], root) if here else pull(KNOWN[ref], root, report))
    path = _existing(ref)
    if path is not None:
        if is_packed(path) and (head := read_head(path)) is not None:
            return Located(str(head["name"]), path)
        first = part_paths(path)[0]  # any part names the model
        path = first if first.exists() else path
        return Located(stem_of(path.resolve().name), path)
    if (hub_name := _hub_name(ref)) is not None:
        from phasewise.serving.loaders.fetching import hub

        path = hub.here(hub_name, root) or hub.pull(hub_name, root, report, _in_tenths(ref, report))
        return Located(ref, path)
    raise _unknown(ref, root)


def fetch(ref: str, root: Path, report: Report, progress: DownloadProgress | None = None) -> Located:
    """Bring a known or a hub name into the cache, or check and update what is there. `progress`: is called as
    bytes come; None: lines of `report` tell of them."""
    if ref in KNOWN:
        return Located(ref, pull(KNOWN[ref], root, report))
    if (hub_name := _hub_name(ref)) is not None:
        from phasewise.serving.loaders.fetching import hub

        return Located(ref, hub.pull(hub_name, root, report, progress or _in_tenths(ref, report)))
    raise _unknown(ref, root)


def known_names(root: Path) -> set[str]:
    """The names that need no path: those that phasewise knows, and those of models in the cache."""
    from phasewise.serving.loaders.inspection import stored_models

    return {*KNOWN, *KNOWN_ON_HUB, *(model.name for model in stored_models(root))}


def known_name(ref: str, root: Path) -> str:
    """The name of a model known here, from its name, file or folder. Raises ModelError for any other."""
    from phasewise.serving.loaders.fetching import hub
    from phasewise.serving.loaders.inspection import packed_caches

    if ref in known_names(root) or any(cache.name == ref for cache in packed_caches(root)):
        return ref
    path = _existing(ref)
    if path is not None:
        return stem_of(path.resolve().name)
    if (hub_name := _hub_name(ref)) is not None and hub.here(hub_name, root) is not None:
        return ref
    raise _unknown(ref, root)


def _hub_name(ref: str) -> str | None:
    """The name on the hub of a known model, or `ref` itself if it is written like one."""
    from phasewise.serving.loaders.fetching import hub

    if ref in KNOWN_ON_HUB:
        return KNOWN_ON_HUB[ref].ref
    return ref if hub.is_hub_name(ref) else None


def _in_tenths(ref: str, report: Report) -> DownloadProgress:
    """Make a progress that reports a line for every tenth of the bytes."""
    told = 0

    def progress(n_bytes: int, total: int) -> None:
        nonlocal told
        if (tenth := 10 * n_bytes // max(total, 1)) > told:
            told = tenth
            report(f"{ref}: {n_bytes / 1e6:.0f} of {total / 1e6:.0f} MB")

    return progress


def _unknown(ref: str, root: Path) -> ModelError:
    """The error for an unknown name, one short line: the name that was meant, or the kinds of names."""
    is_path = ref.endswith(".gguf") or ref.startswith(("/", "./", "../", "~"))
    said = f"there is no file or folder {ref!r:.200}" if is_path else f"no model {ref!r:.200}"
    return ModelError(said + (meant(ref, _like(ref, is_path, root)) or KINDS_OF_NAMES))


def _like(ref: str, is_path: bool, root: Path) -> set[str]:
    """Names that could have been meant: of models, and of what lies in the folder that `ref` names."""
    head, slash, _ = ref.rpartition("/")
    pattern = "*" if is_path else "*.gguf"
    try:
        beside = {
            f"{head}{slash}{path.name}" for path in Path(head or slash or ".").expanduser().glob(pattern)
        }
    except (OSError, RuntimeError, ValueError):
        beside = set()
    return beside if is_path else known_names(root) | beside


def _existing(ref: str) -> Path | None:
    try:
        path = Path(ref).expanduser()
        return path if ref and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown user's home, a NUL byte
        return None
