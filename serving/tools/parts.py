"""The parts of an answer, and the common parts of its readers.

A reader is fed the text of an answer as it comes and gives out parts. How the text was cut makes no
difference: the same calls come out, and the same text once adjacent pieces are joined. What cannot be read
as a call is given out as the text that it is. Where a grammar holds a call from its beginning on, it cannot
become text any more, and its arguments are given out as they come: `Begun`, then `Piece`s.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol


class Text(NamedTuple):
    """A piece of the answer proper."""

    text: str


class Reasoning(NamedTuple):
    """A piece of what the model thinks before it answers."""

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


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        ...

    def finish(self) -> list[Part]:
        """The rest: no more text comes."""
        ...


class PlainReader:
    """All of it is text."""

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class Trimmed:
    """Another reader's parts without the white space where their kind changes.

    Models put line ends around calls and thoughts; an answer of text alone is left as it is.
    """

    def __init__(self, inner: Reader) -> None:
        self._inner = inner
        self._kind: type[Part] | None = None
        self._space = ""
        self._has_changed = False

    def feed(self, text: str) -> list[Part]:
        return self._trimmed(self._inner.feed(text))

    def finish(self) -> list[Part]:
        parts = self._trimmed(self._inner.finish())
        if self._space and self._kind is Text and not self._has_changed:
            parts.append(Text(self._space))
        self._space = ""
        return parts

    def _trimmed(self, parts: Iterable[Part]) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Call | Begun | Piece):
                self._change(Call)
                out.append(part)
                continue
            text = part.text
            if type(part) is not self._kind:
                if self._kind is not None or type(part) is Reasoning:
                    text = text.lstrip()
                    if not text:
                        continue
                self._change(type(part))
            held = self._space + text
            kept = held.rstrip()
            self._space = held[len(kept) :]
            if kept:
                out.append(type(part)(kept))
        return out

    def _change(self, kind: type[Part]) -> None:
        self._has_changed = self._has_changed or self._kind is not None or kind is not Text
        self._kind, self._space = kind, ""


class JsonEnd:
    """Finds the end of a JSON object or list in a text that grows. Linear in the text, however it is cut."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str, stops: str = "") -> int | None:
        """Goes on in `text`: the place behind its last bracket, or, with none open yet, of one of `stops`.
        None: that is not in it.
        """
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            sign_match = (_IN_STRING if self._in_string else _OUTSIDE).search(text, position)
            if sign_match is None:
                return None
            sign, position = sign_match[0], sign_match.end()
            if sign == "\\":
                self._is_escaped = self._in_string
            elif sign == '"':
                self._in_string = not self._in_string
            elif self._depth == 0 and sign in stops:
                return position - 1
            else:
                self._depth += (sign in "{[") - (sign in "}]")
                if sign in "}]" and self._depth <= 0:
                    return position
        return None


_MOST_DIGITS = 1000
"""Python refuses to read integers of some thousands of digits."""
_OUTSIDE = re.compile(r'["{}\[\],)]')
_IN_STRING = re.compile(r'["\\]')


def n_begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def parsed(text: str) -> Any | None:
    """The JSON value; None where it is none, or one that cannot be written again."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    """Numbers beyond a float's range as the largest of their sign: `1e999` is JSON, infinity is not."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _MOST_DIGITS else _finite(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def call(name: str, arguments: Any) -> Call | None:
    """A call with these arguments: an object, or a text that is one; else None."""
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    if not isinstance(arguments, dict):
        return None
    text = written(arguments)
    return None if text is None else Call(name, text)


def written(value: Any) -> str | None:
    """As JSON that every encoder takes; None where there is none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value)
    except (ValueError, RecursionError):
        return None
    return text
