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
from abc import ABC, abstractmethod
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


class BufferedReader(ABC):
    """Keeps the text of which it is not certain yet what it is, in `_buffer`."""

    _buffer = ""

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        return self._drain(final=False)

    def finish(self) -> list[Part]:
        return self._drain(final=True)

    @abstractmethod
    def _drain(self, *, final: bool) -> list[Part]:
        """Take off the buffer what is certain; final: all of it."""


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
    """Finds the end of a JSON object or list in a text that grows. Linear in the text, however it is cut.

    depth: brackets that are open at its beginning.
    """

    def __init__(self, depth: int = 0) -> None:
        self._at = 0
        self._depth = depth
        self._in_string = self._is_escaped = False
        self._end: int | None = None

    def find(self, text: str, start: int) -> int | None:
        """Behind the bracket that closes the one at `start`; None: it has not come. `text` only grows."""
        if self._end is None:
            begin = max(self._at, start)
            end = self.push(text[begin:])
            self._at = len(text)
            self._end = None if end is None else begin + end
        return self._end

    def push(self, text: str, depth: int = 0, stops: str = "") -> int | None:
        """Goes on in `text`, up to where no more than `depth` brackets are open; None: that is not in it.

        The place behind the bracket that closes them, or, with none open yet, of one of `stops`.
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
            elif self._depth == depth and sign in stops:
                return position - 1
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= depth:
                    return position
        return None


_MOST_DIGITS = 1000
"""Python refuses to read integers of some thousands of digits."""
_OUTSIDE = re.compile(r'["{}\[\],)]')
_IN_STRING = re.compile(r'["\\]')


class HeldCalls:
    """The calls in one JSON value whose form a grammar holds: their arguments are given out as they come.

    The value is an object `{"name": "f", KEY: {...}}`, or a list of such. What else stands in it is left out.
    head: an object's text up to its arguments. depth: brackets around the arguments of the first call, which
    has begun.
    """

    def __init__(self, head: re.Pattern[str], depth: int) -> None:
        self._head, self._depth = head, depth
        self._json = JsonEnd(depth)
        self._gap: str | None = None
        """Between two calls, or behind the last one; None within arguments."""

    def feed(self, text: str) -> tuple[list[Part], int | None]:
        """Parts, and how much of `text` belongs to the value; None: all of it, and more must come."""
        parts: list[Part] = []
        position = 0
        while position < len(text):
            if self._gap is None:
                end = self._json.push(text[position:], self._depth)
                parts.append(Piece(text[position:] if end is None else text[position : position + end]))
                position = len(text) if end is None else position + end
                self._gap = None if end is None else ""
                continue
            n_before = len(self._gap)
            self._gap += text[position:]
            end = JsonEnd(self._depth).push(self._gap)
            head = self._head.search(self._gap, 0, len(self._gap) if end is None else end)
            if head is not None:
                position += head.end() - n_before
                parts.append(Begun(head[1]))
                self._json, self._gap = JsonEnd(self._depth), None
            elif end is not None:
                return parts, position + end - n_before
            elif len(self._gap) > _LONGEST_HEAD:
                return parts, len(text)
            else:
                return parts, None
        return parts, None


class NamedArguments:
    """The arguments of a call whose name has been read, as they come: an object alone."""

    def __init__(self) -> None:
        self._json = JsonEnd()

    def feed(self, text: str) -> tuple[list[Part], int | None]:
        """Parts, and how much of `text` belongs to them; None: all of it, and more must come."""
        end = self._json.push(text)
        piece = text if end is None else text[:end]
        return [Piece(piece)] if piece else [], end


class Coming(Protocol):
    """Gives out the arguments of calls as they come."""

    def feed(self, text: str) -> tuple[list[Part], int | None]:
        """Parts, and how much of `text` belongs to the calls; None: all of it, and more must come."""
        ...


Beginning = tuple[Begun, int, Coming]
"""A call, where its arguments begin, and what reads them."""


def held_begins(names: frozenset[str], key: str = "arguments") -> Callable[[str, str, int], Beginning | None]:
    """Finds a call of one of `names` with its arguments under `key`, for `MarkedReader`."""
    options = "|".join(map(re.escape, sorted(names)))
    head = re.compile(rf'\{{"name": "({options})", "{key}": (?=\{{)')

    def begins(_head: str, text: str, start: int) -> Beginning | None:
        is_list = text.startswith("[", start)
        call_head = head.match(text, start + is_list)
        return (
            None
            if call_head is None
            else (Begun(call_head[1]), call_head.end(), HeldCalls(head, 1 + is_list))
        )

    return begins


class MarkedReader(BufferedReader):
    """Calls that follow a mark, as JSON.

    `opening` begins one and `closing`, which may be left out, ends it. `head`: reads what stands between the
    mark and the JSON. `calls_of`: the calls that the head and the JSON's value mean; none: it is text.
    `begins`: the call that begins with the JSON at a place, after a head, where a grammar holds it and its
    arguments are given out as they come; None where calls are given out whole.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        head: re.Pattern[str],
        calls_of: Callable[[str, Any], list[Call]],
        begins: Callable[[str, str, int], Beginning | None] | None = None,
    ) -> None:
        self._opening, self._closing, self._head, self._calls_of = opening, closing, head, calls_of
        self._begins = begins
        self._json: JsonEnd | None = None
        """While a call is read; the buffer begins with its mark then."""
        self._coming: Coming | None = None
        """While the arguments of a call are given out; the buffer begins within them then."""
        self._may_close = False
        """True if a call has just ended."""

    def _drain(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._buffer and self._step(parts, final=final):
            pass
        return parts

    def _step(self, parts: list[Part], *, final: bool) -> bool:
        """Reads the buffer's beginning; False: more must come."""
        if self._coming is not None:
            return self._go_on(self._coming, parts)
        if self._may_close and not self._close(final=final):
            return False
        if self._json is None:
            index = self._buffer.find(self._opening)
            if index < 0:
                n_kept = 0 if final else n_begun(self._buffer, self._opening)
                self._take(len(self._buffer) - n_kept, parts)
                return False
            self._take(index, parts)
            self._json = JsonEnd()
        return self._read(self._json, parts, final=final)

    def _go_on(self, coming: Coming, parts: list[Part]) -> bool:
        more, end = coming.feed(self._buffer)
        parts += more
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._coming, self._may_close = None, True
        return end is not None

    def _close(self, *, final: bool) -> bool:
        """Leaves the closing mark out. False: it may be coming."""
        rest = self._buffer.lstrip()
        if rest.startswith(self._closing):
            self._buffer = rest.removeprefix(self._closing)
        elif self._closing.startswith(rest) and not final:
            return False
        self._may_close = False
        return bool(self._buffer)

    def _take(self, n_characters: int, parts: list[Part]) -> None:
        if n_characters:
            parts.append(Text(self._buffer[:n_characters]))
            self._buffer = self._buffer[n_characters:]

    def _read(self, end_of_json: JsonEnd, parts: list[Part], *, final: bool) -> bool:
        """Reads the call at the buffer's start, if it is one. False: more must come."""
        text, begin = self._buffer, len(self._opening)
        start = _first_bracket(text, begin)
        if start is None:
            return (final or len(text) - begin > _LONGEST_HEAD) and self._is_text(begin, parts)
        if self._head.fullmatch(text, begin, start) is None:
            return self._is_text(begin, parts)
        begun = self._begins(text[begin:start], text, start) if self._begins else None
        if begun is not None:
            call_begun, arguments_begin, self._coming = begun
            parts.append(call_begun)
            self._json, self._buffer = None, text[arguments_begin:]
            return True
        end = end_of_json.find(text, start)
        if end is None:
            return final and self._is_text(begin, parts)
        value = parsed(text[start:end])
        calls = [] if value is None else self._calls_of(text[begin:start], value)
        if not calls:
            return self._is_text(end, parts)
        parts += calls
        self._json, self._may_close, self._buffer = None, True, text[end:]
        return True

    def _is_text(self, n_characters: int, parts: list[Part]) -> bool:
        """Note that what was read is no call."""
        self._json = None
        self._take(n_characters, parts)
        return True


_LONGEST_HEAD = 512
_BRACKET = re.compile(r"[{\[](?!ARGS\]|CALL_ID\])")
_MAYBE_MARK = re.compile(r"\[[A-Z_]{0,8}\Z")


def _first_bracket(text: str, begin: int) -> int | None:
    """The index at which the JSON begins; None while that is not certain: a bracket may begin a mark of
    Mistral's.
    """
    bracket = _BRACKET.search(text, begin)
    if bracket is None or (bracket[0] == "[" and _MAYBE_MARK.match(text, bracket.start())):
        # A list that is still `[`: what follows decides.
        return None
    return bracket.start()


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
