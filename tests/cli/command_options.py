"""Every command of `phasewise` and its options, by introspection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from phasewise.cli.main import app


def commands() -> dict[str, Any]:
    """Each command as it is typed after `phasewise`, and what runs it."""
    return dict(_below(typer.main.get_command(app), ()))


def _below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield " ".join(path), command
        return
    for name, child in children.items():
        yield from _below(child, (*path, name))


def options_of(command: str) -> list[str]:
    """The first long flag of each option of a command, else its first flag."""
    return [
        next((flag for flag in one.opts if flag.startswith("--")), one.opts[0])
        for one in commands()[command].params
        if one.opts[0].startswith("-") and one.name != "help"
    ]
