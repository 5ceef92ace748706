"""The parts of an answer.

A reader is fed the text of an answer as it comes and gives out parts. How the text was cut makes no
difference: the same calls come out, and the same text once pieces are joined. Text that cannot be read as a
call stays text. A call that a grammar holds is given out as it comes: `Begun`, then `Piece`s."""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """A piece of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the model's thoughts."""

    text: str


class Call(NamedTuple):
    """A whole call. `arguments`: the text of a JSON object."""

    name: str
    arguments: str


class Begun(NamedTuple):
    """The beginning of a call whose arguments come in pieces."""

    name: str


class Piece(NamedTuple):
    """A piece of the arguments of the call that has begun last, as the model wrote it."""

    text: str


Part = Text | Reasoning | Call | Begun | Piece


class Reader:
    """A reader of one answer: of one that is text alone, unless a subclass finds more."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain with this text."""
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        """The remaining parts, when no more text comes."""
        return []
