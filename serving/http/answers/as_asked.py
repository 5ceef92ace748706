"""The calls of an answer as its request has the functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from phasewise.serving.http.requests.chat_schemas import INPUT
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reader, parsed


class CustomCall(Call):
    """A whole call of a custom tool. `arguments`: the text that it is given."""


class AsAsked:
    """Another reader's parts, functions under the names of the request, custom tools with their text."""

    def __init__(self, inner: Reader, names: Mapping[str, str], customs: frozenset[str]) -> None:
        self._inner = inner
        self._names = names
        self._customs = customs
        self._custom: str | None = None
        """The custom tool whose call has begun."""
        self._arguments = ""

    def feed(self, text: str) -> list[Part]:
        return list(self._asked(self._inner.feed(text)))

    def finish(self) -> list[Part]:
        return [*self._asked(self._inner.finish()), *self._ended()]

    def _asked(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Piece) and self._custom is not None:
                self._arguments += part.text
                continue
            yield from self._ended()
            if isinstance(part, Begun | Call):
                name = self._names.get(part.name, part.name)
                if part.name in self._customs:
                    self._custom, self._arguments = name, part.arguments if isinstance(part, Call) else ""
                    continue
                part = part._replace(name=name)
            yield part

    def _ended(self) -> Iterator[Part]:
        if self._custom is not None:
            value = parsed(self._arguments)
            text = value.get(INPUT) if isinstance(value, dict) else None
            yield CustomCall(self._custom, text if isinstance(text, str) else self._arguments)
        self._custom = None
