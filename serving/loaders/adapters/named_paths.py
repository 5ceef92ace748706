"""Adapters as users name them: `NAME=PATH`, or a path whose own name is theirs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from phasewise.serving.errors import ModelError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def named_path(text: str) -> tuple[str, Path]:
    """The name and the path of `NAME=PATH` or `PATH`. ModelError for a name that no request could say."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        path = text
        name = Path(text).name.removesuffix(".gguf")
    if not NAME.fullmatch(name) or not path:
        raise ModelError(
            f"adapter {text!r:.120}: NAME=PATH expected, a name of letters, digits, '.', '_' and '-'"
        )
    return name, Path(path)


def named_paths(texts: Sequence[str]) -> list[tuple[str, Path]]:
    """All of them. ModelError where two have one name."""
    named = [named_path(text) for text in texts]
    names = [name for name, _ in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ModelError(f"two adapters are called {twice}: give another name with NAME=PATH")
    return named
