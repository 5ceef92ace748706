"""What a user may call a model, and where it then lies on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.registry import KNOWN, is_here, known_path, pull

SOURCE_SUFFIXES = (".json", ".safetensors", ".jinja")  # what a Hugging Face directory is read from
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Located:
    """A model on disk: a GGUF file or a Hugging Face directory, and what to call it."""

    name: str
    path: Path

    def files(self) -> list[Path]:
        """Every file that the model is read from, sorted."""
        if not self.path.is_dir():
            return [self.path]
        own = [path for path in self.path.iterdir() if path.suffix in SOURCE_SUFFIXES]
        return sorted(own + [path for path in self.path.glob("*_Pooling/config.json") if path.is_file()])


def cache_root(override: Path | None = None) -> Path:
    """`override`, or `$PHASEWISE_CACHE`, or phasewise's place in the XDG cache directory."""
    if override is not None:
        return override
    if named := os.environ.get("PHASEWISE_CACHE"):
        return Path(named)
    import platformdirs

    return platformdirs.user_cache_path("phasewise")


def locate(ref: str, root: Path, report: Report) -> Located:
    """Find `ref`, fetching it where it is a known or a hub name that is not here yet."""
    if ref in KNOWN:
        here = is_here(KNOWN[ref], root)
        return Located(ref, known_path(KNOWN[ref], root) if here else pull(KNOWN[ref], root, report))
    path = _existing(ref)
    if path is not None:
        return Located(path.resolve().name.removesuffix(".gguf"), path)
    if HUB_NAME.fullmatch(ref) and not ref.endswith(".gguf"):
        from phasewise.serving.loaders import hub

        return Located(ref, hub.remembered(ref, root) or hub.download(ref, root, report))
    raise _unknown(ref)


def fetch(ref: str, root: Path, report: Report) -> Located:
    """Bring a known or a hub name into the cache, or check and update what is there."""
    if ref in KNOWN:
        return Located(ref, pull(KNOWN[ref], root, report))
    if HUB_NAME.fullmatch(ref):
        from phasewise.serving.loaders import hub

        return Located(ref, hub.download(ref, root, report))
    raise _unknown(ref)


def _unknown(ref: str) -> ModelError:
    return ModelError(
        f"no model {ref!r:.200}: give a known name ({', '.join(KNOWN)}), a .gguf file,"
        " a Hugging Face directory or a hub name such as org/name"
    )


def _existing(ref: str) -> Path | None:
    try:
        path = Path(ref).expanduser()
        return path if ref and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown user's home, a NUL byte
        return None
