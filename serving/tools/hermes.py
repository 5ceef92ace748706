"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.serving.tools.parts import Call, MarkedReader, Reader, call_of, held_begins
from phasewise.serving.tools.tool_format import (
    Function,
    ToolFormat,
    Wanted,
    grammar_of,
    json_call,
    mark,
    repeated,
    rules_of_calls,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """See the module."""

    name = "hermes"
    control_texts = (OPENING, CLOSING)
    only_first = False

    def fits(self, template: str) -> bool:
        return OPENING in template

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        return (OPENING,)

    def reader(self, names: frozenset[str], *, is_held: bool = False) -> Reader:
        def calls_of(_head: str, value: Any) -> list[Call]:
            called = call_of(value, names)
            return [] if called is None else [called]

        begins = held_begins(names) if is_held else None
        return MarkedReader(OPENING, CLOSING, re.compile(r"\s*"), calls_of, begins)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        opening, closing = mark(OPENING, control), mark(CLOSING, control)
        rules = [("call", f"{opening} SPACE? body SPACE? {closing}"), ("SPACE", r"/[ \n]{1,2}/")]
        rules += rules_of_calls("body", wanted.functions, json_call)
        return grammar_of(repeated("call", "SPACE?", wanted.most_calls), rules, wanted)
