"""The help of every command is plain text within 80 columns, and has no colours off a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from phasewise.cli.main import app

COLUMNS = 80


def commands(command: Any, path: str = "") -> Iterator[str]:
    """The full name of every command that does something."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path
        return
    for name in children:
        yield from commands(children[name], f"{path} {name}".strip())


EVERY = sorted(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", ["", *EVERY])
def test_help_fits_the_terminal(path: str) -> None:
    environment = {"COLUMNS": str(COLUMNS), "PHASEWISE_CONFIG": "/dev/null"}
    result = CliRunner().invoke(app, [*path.split(), "--help"], env=environment)

    assert result.exit_code == 0
    assert [line for line in result.stdout.splitlines() if len(line) > COLUMNS] == []
    assert "\x1b" not in result.stdout
