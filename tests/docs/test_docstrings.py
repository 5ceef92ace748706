"""Docstrings begin with the thing or the verb, so that a search and a skimming reader meet its name first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.resolve() for path in (ROOT / "phasewise").iterdir() if path.is_symlink())
OWN = [*sorted((ROOT / "phasewise").glob("*.py")), ROOT / "setup.py"]
ALL = [*ROOMS, *(ROOT / name for name in ("phasewise", "benchmarks", "tests"))]
QUESTIONS = ("What", "How", "Whether", "Where", "Which", "Who")
"""First words after which a reader has to wait for what the sentence is about."""
SOMEWHERE = re.compile(rf"""["']\\?\s*({"|".join(QUESTIONS)})\b""")
"""In every file of such a docstring: walking through the others would take seconds."""


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes, functions, and those below attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


@pytest.mark.parametrize("room", ALL, ids=lambda path: path.name)
def test_no_docstring_begins_with_a_question(room: Path) -> None:
    paths = OWN if room.name == "phasewise" else sorted(room.rglob("*.py"))
    assert paths

    asking = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in paths
        for source in [path.read_text()]
        if SOMEWHERE.search(source)
        for line, text in texts_of(ast.parse(source))
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0].rstrip(",:") in QUESTIONS
    ]

    assert asking == []
