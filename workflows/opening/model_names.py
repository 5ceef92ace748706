"""Completions of a MODEL that is being typed: names of models, and files and folders that may hold one."""

from __future__ import annotations

import os
from pathlib import Path

SUFFIX = ".gguf"


def completions(begun: str) -> list[str]:
    """Known names, names of models in the cache, `.gguf` files and folders that begin with `begun`."""
    return names(begun) + _paths(begun)


def names(begun: str) -> list[str]:
    """Known names and names of models in the cache that begin with `begun`."""
    from phasewise.serving.loaders.fetching.resolve import cache_root, known_names

    return sorted(name for name in known_names(cache_root()) if name.startswith(begun))


def _paths(begun: str) -> list[str]:
    head, _, tail = begun.rpartition("/")
    prefix = f"{head}/" if "/" in begun else ""
    try:
        entries = sorted(
            os.scandir(Path(prefix).expanduser() if prefix else "."), key=lambda entry: entry.name
        )
    except (OSError, ValueError):
        return []
    hidden = "" if tail.startswith(".") else "."
    matching = [
        entry
        for entry in entries
        if entry.name.startswith(tail) and not (hidden and entry.name.startswith(hidden))
    ]
    return [
        f"{prefix}{entry.name}" + ("/" if entry.is_dir() else "")
        for entry in matching
        if entry.is_dir() or entry.name.endswith(SUFFIX)
    ]
