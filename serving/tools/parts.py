"""What an answer consists of, and the common parts of its readers.

A reader is fed the text of an answer as it comes and gives out parts. How the text was cut makes no
difference: the same calls come out, and the same text once adjacent pieces are joined. What cannot be read
as a call is given out as the text that it is.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
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


Part = Text | Reasoning | Call


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
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
            if isinstance(part, Call):
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
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def find(self, text: str, start: int) -> int | None:
        """Behind the bracket that closes the one at `start`; None: it has not come. `text` only grows."""
        if self._end is not None:
            return self._end
        at = max(self._at, start)
        while at < len(text):
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                at = len(text)
                break
            sign, at = found[0], found.end()
            if sign == "\\":
                if at == len(text):  # what it escapes has not come
                    at -= 1
                    break
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif sign in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._end = at
                    return at
        self._at = at
        return None


_MOST_DIGITS = 1000
"""Python refuses to read integers of some thousands of digits."""
_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class MarkedReader:
    """Calls that follow a mark, as JSON.

    `opening` begins one and `closing`, which may be left out, ends it. `head`: reads what stands between the
    mark and the JSON. `calls_of`: the calls that the head and the JSON's value mean; none: it is text.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        head: re.Pattern[str],
        calls_of: Callable[[str, Any], list[Call]],
    ) -> None:
        self._opening, self._closing, self._head, self._calls_of = opening, closing, head, calls_of
        self._buffer = ""
        self._json: JsonEnd | None = None
        """While a call is read; the buffer begins with its mark then."""

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        return self._drain(final=False)

    def finish(self) -> list[Part]:
        return self._drain(final=True)

    def _drain(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._buffer:
            if self._json is None:
                at = self._buffer.find(self._opening)
                if at < 0:
                    n_kept = 0 if final else n_begun(self._buffer, self._opening)
                    self._take(len(self._buffer) - n_kept, parts)
                    break
                self._take(at, parts)
                self._json = JsonEnd()
            read = self._read(self._json, final=final)
            if read is None and not final:
                break
            n_read, calls = read or (len(self._opening), [])
            self._json = None
            if calls:
                self._buffer = self._buffer[n_read:]
                parts += calls
            else:
                self._take(n_read, parts)
        return parts

    def _take(self, n_characters: int, parts: list[Part]) -> None:
        if n_characters:
            parts.append(Text(self._buffer[:n_characters]))
            self._buffer = self._buffer[n_characters:]

    def _read(self, end_of_json: JsonEnd, *, final: bool) -> tuple[int, list[Call]] | None:
        """(Characters read, calls) of the call at the buffer's start; None: more must come."""
        text, begin = self._buffer, len(self._opening)
        start = _first_bracket(text, begin)
        if start is None:
            return None if len(text) - begin <= _LONGEST_HEAD else (begin, [])
        if self._head.fullmatch(text, begin, start) is None:
            return begin, []
        end = end_of_json.find(text, start)
        if end is None:
            return None
        value = parsed(text[start:end])
        calls = [] if value is None else self._calls_of(text[begin:start], value)
        if not calls:
            return end, []
        rest = _SPACE.match(text, end)
        assert rest is not None
        after = rest.end()
        if text.startswith(self._closing, after):
            return after + len(self._closing), calls
        is_open = len(text) - after < len(self._closing) and self._closing.startswith(text[after:])
        return None if is_open and not final else (end, calls)


_LONGEST_HEAD = 512
_SPACE = re.compile(r"\s*")
_BRACKET = re.compile(r"[{\[](?!ARGS\]|CALL_ID\])")
_MAYBE_MARK = re.compile(r"\[[A-Z_]{0,8}\Z")


def _first_bracket(text: str, begin: int) -> int | None:
    """Where the JSON begins; None while that is not certain: a bracket may begin a mark of Mistral's."""
    found = _BRACKET.search(text, begin)
    if found is None or (found[0] == "[" and _MAYBE_MARK.match(text, found.start())):
        # A list that is still `[`: what follows decides.
        return None
    return found.start()


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


def call_of(
    value: Any, names: frozenset[str], keys: tuple[str, ...] = ("arguments", "parameters")
) -> Call | None:
    """The call that an object `{"name": ..., "arguments": {...}}` means; None: none of `names`."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    return call(name, arguments)


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
