"""The contract of a format of tool calls, and how its grammars are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from phasewise.serving.grammar.grammar_limits import checked_schema, holdable
from phasewise.serving.tools.parts import Reader

MOST_CALLS = 16
"""Most calls of one answer that must call: a small model may else begin new calls until its tokens end."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters`: a JSON schema of an object; {}: none are described."""

    name: str
    parameters: Mapping[str, Any]
    description: str = ""
    is_strict: bool = False
    """True if a schema that cannot be kept in every detail is refused; else it is kept as far as possible."""


class Wanted(NamedTuple):
    """The calls that an answer may have. `or_document`: a rule of Lark for an answer without any; "":
    none.
    """

    functions: Sequence[Function]
    most_calls: int = MOST_CALLS
    or_document: str = ""


class ToolFormat(Protocol):
    """The form in which a model writes calls."""

    name: str

    @property
    def only_first(self) -> bool:
        """True if calls are the whole answer, and never follow text."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """Texts in which control tokens may stand that the reader wants to see."""
        ...

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        """Texts of which each begins a call."""
        ...

    def reader(self, functions: Collection[str], *, is_held: bool = False) -> Reader:
        """A reader of calls of these functions: their names, or a mapping from these to schemas of arguments.

        is_held: calls keep `grammar`, so that their arguments are given out as they come.
        """
        ...

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        """The grammar of answers that consist of calls, from the trigger on, in llguidance's Lark.

        `control`: ids of control tokens by their texts. RequestError where a schema is too large.
        """
        ...


_KEPT = {
    "whitespace_pattern": r"( |\n[ \t]{0,32})",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": True,
}


def literal(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text)


def mark(text: str, control: Mapping[str, int]) -> str:
    """A mark of a format: the control token of that text where the vocabulary has one."""
    return f"<[{control[text]}]>" if text in control else literal(text)


def arguments_rule(function: Function) -> str:
    """Lark for the JSON of its arguments. RequestError where the schema is too large."""
    return json_rule(function.parameters or {"type": "object"}, lenient=not function.is_strict)


def json_rule(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Lark for JSON that keeps a schema. lenient: leave out what the engine cannot hold answers to."""
    checked_schema(dict(schema))
    schema = holdable(dict(schema)) if lenient else schema
    own = {key: value for key, value in schema.items() if key != "x-guidance"}
    if "type" not in own and not {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"} & own.keys():
        own["type"] = "object"
    return "%json " + json.dumps({**own, "x-guidance": {**_KEPT, "lenient": lenient}})


def grammar_of(start: str, rules: Iterable[tuple[str, str]], wanted: Wanted) -> str:
    """A grammar of named rules. `start` is its first one."""
    document = f" | {wanted.or_document}" if wanted.or_document else ""
    lines = ["%llguidance {}", f"start: {start}{' | document' if document else ''}"]
    if document:
        lines.append(f"document: {wanted.or_document}")
    lines += [f"{name}: {body}" for name, body in rules]
    return "\n".join(lines) + "\n"


def rules_of_calls(
    name: str, functions: Sequence[Function], written: Callable[[Function, str], str]
) -> list[tuple[str, str]]:
    """Rule `name`: a call of any function. `written`: a function's call, given the rule of its arguments."""
    rules = [(name, " | ".join(f"{name}_{number}" for number in range(len(functions))))]
    for number, function in enumerate(functions):
        rules.append((f"{name}_{number}", written(function, f"arguments_{number}")))
        rules.append((f"arguments_{number}", arguments_rule(function)))
    return rules
