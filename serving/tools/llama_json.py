"""Llama 3.1 to 3.3: the whole answer is `{"name": ..., "parameters": {...}}`, several set apart by `; `.

`<|python_tag|>` may stand in front.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from phasewise.serving.tools.parts import (
    BufferedReader,
    Coming,
    JsonEnd,
    Part,
    Reader,
    Text,
    call_of,
    held_begins,
    parsed,
)
from phasewise.serving.tools.tool_format import (
    Function,
    ToolFormat,
    Wanted,
    grammar_of,
    json_call,
    repeated,
    rules_of_calls,
)

PYTHON_TAG = "<|python_tag|>"
_BEFORE = re.compile(r"\s*(?:<\|python_tag\|>)?\s*")
_BETWEEN = re.compile(r"[\s;,]*(?:<\|python_tag\|>)?\s*")


class LlamaJson(ToolFormat):
    """See the module."""

    name = "llama3-json"
    control_texts = (PYTHON_TAG,)
    only_first = True

    def fits(self, template: str) -> bool:
        return PYTHON_TAG in template or '"parameters": dictionary of argument name' in template

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        return ('{"name":', f'{PYTHON_TAG}{{"name":')

    def reader(self, names: frozenset[str], *, is_held: bool = False) -> Reader:
        return _JsonAnswerReader(names, is_held=is_held)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        rules = rules_of_calls("call", wanted.functions, partial(json_call, key="parameters"))
        tag = f"<[{control[PYTHON_TAG]}]>? " if PYTHON_TAG in control else ""
        return grammar_of(tag + repeated("call", '"; "', wanted.most_calls), rules, wanted)


class _JsonAnswerReader(BufferedReader):
    def __init__(self, names: frozenset[str], *, is_held: bool) -> None:
        self._names = names
        self._begins = held_begins(names, "parameters") if is_held else None
        self._coming: Coming | None = None
        self._gap = _BEFORE
        self._json = JsonEnd()
        self._is_text = False

    def _drain(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._buffer and not self._is_text:
            if self._coming is not None:
                more, n_read = self._coming.feed(self._buffer)
                parts += more
                self._buffer = "" if n_read is None else self._buffer[n_read:]
                self._coming = self._coming if n_read is None else None
                continue
            gap = self._gap.match(self._buffer)
            assert gap is not None
            start = gap.end()
            rest = self._buffer[start:]
            if not final and (not rest or PYTHON_TAG.startswith(rest)):
                return parts  # the tag may be coming
            if not rest.startswith("{"):
                if not rest and self._gap is _BETWEEN:
                    self._buffer = ""  # signs between calls that do not come
                self._is_text = True
                break
            begun = self._begins("", self._buffer, start) if self._begins else None
            if begun is not None:
                call_begun, arguments_at, self._coming = begun
                parts.append(call_begun)
                self._buffer, self._gap, self._json = self._buffer[arguments_at:], _BETWEEN, JsonEnd()
                continue
            end = self._json.find(self._buffer, start)
            if end is None:
                if final:
                    break
                return parts
            called = call_of(parsed(self._buffer[start:end]), self._names, ("parameters", "arguments"))
            if called is None:
                self._is_text = True
                break
            parts.append(called)
            self._buffer, self._gap, self._json = self._buffer[end:], _BETWEEN, JsonEnd()
        if self._buffer:
            parts.append(Text(self._buffer))
            self._buffer = ""
        return parts
