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
    arguments_rule,
    grammar_of,
    literal,
    mark,
    repeated,
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
            found = call_of(value, names)
            return [] if found is None else [found]

        begins = held_begins(names) if is_held else None
        return MarkedReader(OPENING, CLOSING, re.compile(r"\s*"), calls_of, begins)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        opening, closing = mark(OPENING, control), mark(CLOSING, control)
        rules = [("call", f"{opening} SPACE? body SPACE? {closing}"), ("SPACE", r"/[ \n]{1,2}/")]
        rules.append(("body", " | ".join(f"body_{at}" for at in range(len(wanted.functions)))))
        for at, function in enumerate(wanted.functions):
            head = literal(f'{{"name": "{function.name}", "arguments": ')
            rules.append((f"body_{at}", f'{head} arguments_{at} "}}"'))
            rules.append((f"arguments_{at}", arguments_rule(function)))
        return grammar_of(repeated("call", "SPACE?", wanted.most_calls), rules, wanted)
