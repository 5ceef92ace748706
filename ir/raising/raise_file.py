"""A C file's function as text of the high level, with the descriptions that its comments give."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phasewise.ir.raising.parse import parse_file
from phasewise.ir.raising.preprocess import read_source
from phasewise.ir.raising.raising import raised
from phasewise.ir.raising.rerolling import without_whole
from phasewise.ir.reading import read
from phasewise.ir.text import printed

_DESCRIBED = re.compile(
    r"^[ \t]*(?://|\*|/\*+)?[ \t]*@arg[ \t]+(\w+)[ \t]*(.*?)(?:\*/)?[ \t]*$", re.MULTILINE
)


def raise_file(
    path: Path,
    function: str,
    isa: str | None = None,
    include: Sequence[Path] = (),
    define: Sequence[str] = (),
    reassociate: bool = False,
) -> str:
    """Raise a C file's function to text of the high level, with `reassociate()` if asked for.

    A comment line `@arg x count=n low=-1 high=1` becomes a `describe` line, where `x` is an argument. Raises
    SourceError where the function is outside the subset.
    """
    kernel = raised(parse_file(path, function, isa, include, define), path)
    text = printed(without_whole(kernel) if reassociate else kernel)
    read_back = read(_with_descriptions(text, read_source(path)), str(path))
    return printed(replace(read_back, reassociate=reassociate))


def _with_descriptions(text: str, source: str) -> str:
    lines = text.splitlines()
    def_index = next(i for i, line in enumerate(lines) if line.startswith("def "))
    names = set(re.findall(r"(\w+): ", lines[def_index]))
    described = {
        name: f'    describe("{name}", {", ".join(words.split())})'
        for name, words in _DESCRIBED.findall(source)
        if name in names
    }
    return "\n".join([*lines[: def_index + 1], *described.values(), *lines[def_index + 1 :]]) + "\n"
