"""Mistral: `[TOOL_CALLS]` before a list of calls, or before each call (`[TOOL_CALLS]name[ARGS]{...}`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.serving.tools.parts import (
    Beginning,
    Begun,
    Call,
    MarkedReader,
    NamedArguments,
    Reader,
    call,
    call_of,
    held_begins,
)
from phasewise.serving.tools.tool_format import (
    Function,
    ToolFormat,
    Wanted,
    grammar_of,
    json_call,
    literal,
    mark,
    repeated,
    rules_of_calls,
)

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"\s*(?:([A-Za-z0-9_.-]{1,128})\s*(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*)?")
_ID_CHARACTERS = 9
"""Mistral's templates refuse ids of any other length."""


class Mistral(ToolFormat):
    """`is_named`: each call has its name before its arguments, as since the tokenizer of version 11."""

    name = "mistral"
    control_texts = (OPENING, ARGUMENTS, CALL_ID)
    only_first = False

    def __init__(self, *, is_named: bool = False) -> None:
        self._is_named = is_named

    def fits(self, template: str) -> bool:
        return OPENING in template

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        return (OPENING,)

    def reader(self, names: frozenset[str], *, is_held: bool = False) -> Reader:
        def calls_of(head: str, value: Any) -> list[Call]:
            parts = _HEAD.fullmatch(head)
            assert parts is not None
            if parts[1] is not None:
                called = call(parts[1], value) if parts[1] in names and isinstance(value, dict) else None
                return [] if called is None else [called]
            listed = value if isinstance(value, list) else [value]
            calls = [call_of(item, names) for item in listed]
            return [called for called in calls if called is not None] if all(calls) else []

        listed_begins = held_begins(names)

        def begins(head: str, text: str, start: int) -> Beginning | None:
            parts = _HEAD.fullmatch(head)
            if parts is None or parts[1] is None:
                return listed_begins(head, text, start)
            is_one = parts[1] in names and text.startswith("{", start)
            return (Begun(parts[1]), start, NamedArguments()) if is_one else None

        return MarkedReader(OPENING, "", _HEAD, calls_of, begins if is_held else None)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        opening, middle = mark(OPENING, control), mark(ARGUMENTS, control)
        if self._is_named:

            def named_call(function: Function, arguments: str) -> str:
                return f"{opening} {literal(function.name)} {middle} {arguments}"

            rules = rules_of_calls("call", wanted.functions, named_call)
            return grammar_of(repeated("call", "", wanted.most_calls), rules, wanted)
        rules = rules_of_calls("call", wanted.functions, json_call)
        calls = repeated("call", '", "', wanted.most_calls)
        return grammar_of(f'{opening} " "? "[" {calls} "]"', rules, wanted)

    def call_id(self, serial: str) -> str:
        return hashlib.sha256(serial.encode()).hexdigest()[:_ID_CHARACTERS]

    def known_id(self, given: str) -> str:
        fits = len(given) == _ID_CHARACTERS and given.isascii() and given.isalnum()
        return given if fits else self.call_id(given)
