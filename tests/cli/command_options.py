"""Every command of `phasewise` and its options, by introspection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.cli import command


@cache
def commands() -> dict[str, Any]:
    """Each command as it is typed after `phasewise`, and what runs it."""
    return dict(_below(command.tree(), ()))


def _below(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    children = getattr(node, "commands", None)
    if children is None:
        yield " ".join(path), node
        return
    for name, child in children.items():
        yield from _below(child, (*path, name))


def flag_of(parameter: Any) -> str | None:
    """The first long flag of an option, else its first flag; None for an argument and for help."""
    if not parameter.opts[0].startswith("-") or parameter.name == "help":
        return None
    return next((flag for flag in parameter.opts if flag.startswith("--")), str(parameter.opts[0]))


def options_of(command: str) -> list[str]:
    return [flag for param in commands()[command].params if (flag := flag_of(param)) is not None]
