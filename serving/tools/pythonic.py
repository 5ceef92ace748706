"""Llama 3.2 and 4 and their kin: the whole answer is a list of calls in Python, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.serving.tools.parts import (
    Begun,
    BufferedReader,
    Call,
    JsonEnd,
    Part,
    Piece,
    Reader,
    Text,
    call,
)
from phasewise.serving.tools.tool_format import (
    Function,
    ToolFormat,
    Wanted,
    grammar_of,
    json_rule,
    literal,
    repeated,
)

START, END = "<|python_start|>", "<|python_end|>"
_BEFORE = re.compile(r"\s*(?:<\|python_start\|>)?\s*")
_AFTER = re.compile(r"\s*(?:<\|python_end\|>)?")
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*\(")
_FIRST_CALL = re.compile(r"\[([A-Za-z0-9_.-]{1,128})\(")
_COMMA = re.compile(r"\s*(,|\])")
_CONSTANTS = {"true": True, "false": False, "null": None}
_DEFINITIONS = ("$defs", "definitions")


class Pythonic(ToolFormat):
    """See the module."""

    name = "pythonic"
    control_texts = (START, END)
    only_first = True

    def fits(self, template: str) -> bool:
        return START in template or "func_name1(" in template

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        return tuple(f"[{function.name}(" for function in functions)

    def reader(self, names: frozenset[str], *, is_held: bool = False) -> Reader:
        return _PythonReader(names, is_held=is_held)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        rules = [("call", " | ".join(f"call_{index}" for index in range(len(wanted.functions))))]
        for index, function in enumerate(wanted.functions):
            rules += _rules_of(f"call_{index}", function)
        return grammar_of(
            f'"[" {repeated("call", chr(34) + ", " + chr(34), wanted.most_calls)} "]"', rules, wanted
        )


def _rules_of(name: str, function: Function) -> list[tuple[str, str]]:
    """A call with its arguments by name, in the order of the schema. Values are JSON: the reader takes it."""
    schema = dict(function.parameters)
    json_rule(schema or {"type": "object"}, lenient=True)  # its size, as a whole
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    head = literal(f"{function.name}(")
    rules = []
    for index, (key, value) in enumerate(properties.items()):
        value = value if isinstance(value, dict) else {}
        body = json_rule({**shared, **value}, lenient=not function.is_strict) if value else "%json {}"
        rules.append((f"{name}_value_{index}", body))
        rules.append((f"{name}_{index}", f"{literal(f'{key}=')} {name}_value_{index}"))
    # What may follow an argument: the next one, or what may follow that where it may be left out.
    keys = list(properties)
    rules += [
        (f"{name}_after_{index}", _following(name, index + 1, keys, needed)) for index in range(len(keys))
    ]
    first = _first(name, keys, needed)
    rules.append((name, f'{head} {first} ")"'))
    return rules


def _following(name: str, index: int, keys: list[str], needed: set[str]) -> str:
    if index == len(keys):
        return '""'
    given = f'", " {name}_{index} {name}_after_{index}'
    return given if keys[index] in needed else f"{given} | {name}_after_{index}"


def _first(name: str, keys: list[str], needed: set[str]) -> str:
    """The arguments from the first that is there."""
    options = []
    for index, key in enumerate(keys):
        options.append(f"{name}_{index} {name}_after_{index}")
        if key in needed:
            break
    else:
        options.append('""')
    return f"({' | '.join(options)})"


class _PythonReader(BufferedReader):
    def __init__(self, names: frozenset[str], *, is_held: bool) -> None:
        self._names, self._is_held = names, is_held
        self._coming: _HeldList | None = None
        self._scan = _ListEnd()
        self._is_text = False

    def _drain(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._is_held and self._coming is None and not self._is_text:
            self._begin()
        if self._coming is not None:
            self._buffer = self._coming.feed(self._buffer, parts)
            if not self._coming.is_over:
                return parts
            rest = self._buffer.lstrip()
            if END.startswith(rest) and not final:
                return parts
            self._buffer, self._coming, self._is_text = rest.removeprefix(END), None, True
        if self._buffer and not self._is_text:
            read = self._read(final=final)
            if read is None:
                return parts
            self._is_text = True
            n_read, calls = read
            parts += calls
            self._buffer = self._buffer[n_read:]
        if self._buffer:
            parts.append(Text(self._buffer))
            self._buffer = ""
        return parts

    def _begin(self) -> None:
        """Give calls out as they come where the first one has begun."""
        gap = _BEFORE.match(self._buffer)
        assert gap is not None
        begun = _FIRST_CALL.match(self._buffer, gap.end())
        if begun is not None and begun[1] in self._names:
            self._coming, self._buffer = _HeldList(self._names), self._buffer[gap.end() + 1 :]

    def _read(self, *, final: bool) -> tuple[int, list[Call]] | None:
        """(Characters, calls); None: more must come."""
        gap = _BEFORE.match(self._buffer)
        assert gap is not None
        start = gap.end()
        rest = self._buffer[start:]
        if not rest.startswith("["):
            may_come = not rest or START.startswith(rest)
            return None if may_come and not final else (0, [])
        end = self._scan.find(self._buffer, start)
        if end is None:
            return (0, []) if final else None
        calls = _calls_in(self._buffer[start:end], self._names)
        if not calls:
            return 0, []
        after = _AFTER.match(self._buffer, end)
        assert after is not None
        tail = self._buffer[end:].lstrip()
        if not final and len(tail) < len(END) and END.startswith(tail):
            return None
        return after.end(), calls


class _HeldList:
    """Calls that keep the grammar, from behind the list's bracket on: names, and values that are JSON.

    They are written as JSON objects as they come.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._value: JsonEnd | None = None
        """While a value is given out."""
        self._is_called = False
        """Between the brackets of a call."""
        self._n_values = 0
        self.is_over = False

    def feed(self, text: str, parts: list[Part]) -> str:
        """Adds to `parts`; gives back what is not read yet."""
        while text and not self.is_over:
            n_read = self._step(text, parts)
            if n_read is None:
                break
            text = text[n_read:]
        return text

    def _step(self, text: str, parts: list[Part]) -> int | None:
        """The number of characters of the text's beginning that were read; None: more must come."""
        if self._value is not None:
            end = self._value.push(text, stops=",)")
            n_read = len(text) if end is None else end
            if n_read:
                parts.append(Piece(text[:n_read]))
            self._value = self._value if end is None else None
            return n_read
        if not self._is_called:
            return self._between_calls(text, parts)
        if text.startswith(")"):
            parts.append(Piece("}" if self._n_values else "{}"))
            self._is_called = False
            return 1
        key_end = text.find("=")
        if key_end < 0:
            return None
        key = json.dumps(text[:key_end].lstrip(", "), ensure_ascii=False)
        parts.append(Piece(f"{', ' if self._n_values else '{'}{key}: "))
        self._n_values += 1
        self._value = JsonEnd()
        return key_end + 1

    def _between_calls(self, text: str, parts: list[Part]) -> int | None:
        if text.startswith("]"):
            self.is_over = True
            return 1
        name_match = _NAME.match(text, len(text) - len(text.lstrip(", ")))
        if name_match is None:
            return None
        parts.append(Begun(name_match[1]))
        self._is_called, self._n_values = True, 0
        return name_match.end()


class _ListEnd:
    """Finds the bracket that closes a list, past texts in either kind of quotes."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""
        self._end: int | None = None

    def find(self, text: str, start: int) -> int | None:
        """Behind it; None while it has not come. `text` only grows."""
        if self._end is not None:
            return self._end
        position = max(self._at, start)
        while position < len(text):
            sign = text[position]
            if sign == "\\" and self._quote:
                if position + 1 == len(text):
                    break
                position += 1
            elif self._quote:
                self._quote = "" if sign == self._quote else self._quote
            elif sign in "\"'":
                self._quote = sign
            elif sign in "([{":
                self._depth += 1
            elif sign in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    self._end = position + 1
                    return self._end
            position += 1
        self._at = position
        return None


def _calls_in(text: str, names: frozenset[str]) -> list[Call]:
    """The calls of `[f(...), g(...)]`; none where any of it is not a call of `names` with plain values."""
    calls, position = [], 1
    while True:
        name_match = _NAME.match(text, position)
        if name_match is None or name_match[1] not in names:
            return []
        end = _ListEnd().find(text, name_match.end() - 1)
        if end is None:
            return []
        parsed_call = call(name_match[1], _arguments(text[name_match.end() : end - 1]))
        comma = _COMMA.match(text, end)
        if parsed_call is None or comma is None:
            return []
        calls.append(parsed_call)
        if comma[1] == "]":
            return calls if comma.end() == len(text) else []
        position = comma.end()


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        tree = ast.parse(f"f({text})", mode="eval").body
        if (
            not isinstance(tree, ast.Call)
            or tree.args
            or any(keyword.arg is None for keyword in tree.keywords)
        ):
            return None
        return {str(keyword.arg): _value(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            return constant
        case _:
            raise ValueError("not a plain value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a text")
