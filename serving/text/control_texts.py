"""Breaks texts of control tokens, such as `<|im_end|>`, in what users write, so that they stay text.

A template writes its own control tokens among its users' contents, and the tokenizer finds both in the
prompt. So a control text within a content gets a mark behind its first character before rendering, and the
mark's tokens are removed from the prompt (`Tokenizer.encode_marked`). A mark is one of Unicode's
noncharacters, which no text uses and no template strips or looks for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_MOST_LOOKED_AT = 64
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ControlTexts:
    """The texts of a vocabulary's control tokens that have at least two characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        beginnings = sorted({text[:_MOST_LOOKED_AT] for text in texts if len(text) > 1})
        self._beginning = re.compile(f"(?={_any_of(beginnings)})(.)", re.DOTALL) if beginnings else None

    def broken(self, messages: Any) -> tuple[Any, str]:
        """`messages` with a mark in each control text, and that mark; "" where there is no control text."""
        if self._beginning is None or not any(map(self._beginning.search, texts_in(messages))):
            return messages, ""
        used = set().union(*map(set, texts_in(messages)))
        mark = next((character for character in _MARKS if character not in used), None)
        if mark is None:
            raise ValueError("a conversation with every noncharacter of Unicode cannot be written out")
        return self._marked(messages, mark), mark

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._beginning is not None
            return self._beginning.sub(rf"\1{mark}", value)
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return value


def texts_in(value: Any) -> Iterable[str]:
    """All strings in a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value:
            yield from texts_in(item)
        if isinstance(value, dict):
            yield from texts_in(list(value.values()))


def _any_of(texts: list[str]) -> str:
    """A pattern that matches any of the texts and reads each character of a match once at most."""
    if len(texts) == 1:
        return re.escape(texts[0])
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    # Where one of them ends it is found, whatever the longer ones with the same beginning want.
    branches = [re.escape(first) + (_any_of(rest) if all(rest) else "") for first, rest in by_first.items()]
    return f"(?:{'|'.join(branches)})"
