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
    arguments_rule,
    grammar_of,
    literal,
    mark,
    repeated,
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
            found = _HEAD.fullmatch(head)
            assert found is not None
            if found[1] is not None:
                one = call(found[1], value) if found[1] in names and isinstance(value, dict) else None
                return [] if one is None else [one]
            listed = value if isinstance(value, list) else [value]
            calls = [call_of(one, names) for one in listed]
            return [one for one in calls if one is not None] if all(calls) else []

        listed_begins = held_begins(names)

        def begins(head: str, text: str, at: int) -> Beginning | None:
            found = _HEAD.fullmatch(head)
            if found is None or found[1] is None:
                return listed_begins(head, text, at)
            is_one = found[1] in names and text.startswith("{", at)
            return (Begun(found[1]), at, NamedArguments()) if is_one else None

        return MarkedReader(OPENING, "", _HEAD, calls_of, begins if is_held else None)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        opening, functions = mark(OPENING, control), wanted.functions
        rules = [("call", " | ".join(f"call_{at}" for at in range(len(functions))))]
        for at, function in enumerate(functions):
            rules.append((f"arguments_{at}", arguments_rule(function)))
            if self._is_named:
                head = f"{opening} {literal(function.name)} {mark(ARGUMENTS, control)}"
                rules.append((f"call_{at}", f"{head} arguments_{at}"))
            else:
                head = literal(f'{{"name": "{function.name}", "arguments": ')
                rules.append((f"call_{at}", f'{head} arguments_{at} "}}"'))
        if self._is_named:
            return grammar_of(repeated("call", "", wanted.most_calls), rules, wanted)
        calls = repeated("call", '", "', wanted.most_calls)
        return grammar_of(f'{opening} " "? "[" {calls} "]"', rules, wanted)

    def call_id(self, serial: str) -> str:
        return hashlib.sha256(serial.encode()).hexdigest()[:_ID_CHARACTERS]

    def known_id(self, given: str) -> str:
        fits = len(given) == _ID_CHARACTERS and given.isascii() and given.isalnum()
        return given if fits else self.call_id(given)
