"""Values of arguments: where they end, and what a value means, by its schema, that is written verbatim."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise._json import refuse_constant
from phasewise.serving.text.turn_form import KEY, ArgumentForm


class ValueEnd:
    """A scanner for the end of a value, past brackets and quotes, in a text that only grows; linear in the
    text. The end is behind the value's last bracket or, with none open, before one of `stops`. `quotes`: the
    marks around strings; within quotes of one character a backslash escapes."""

    def __init__(self, stops: str, quotes: Sequence[str]) -> None:
        self._stops, self._quotes = stops, quotes
        self._open, self._close = ("{[(", "}])") if "'" in quotes else ("{[", "}]")
        self._signs = re.compile("|".join(map(re.escape, (*quotes, *self._open, *self._close, *stops))))
        self._at, self._depth, self._quote = 0, 0, ""

    def find(self, text: str, start: int) -> tuple[int, bool]:
        """The position reached in a value that continues at `start`, and True if the value ends there."""
        self._at = max(self._at, start)
        end = len(text) - max(n_begun(text, quote) for quote in self._quotes)
        while self._at < end:
            escape = r"|\\" if len(self._quote) == 1 else ""
            pattern = re.compile(re.escape(self._quote) + escape) if self._quote else self._signs
            match = pattern.search(text, self._at, end)
            self._at, sign = (match.end(), match[0]) if match else (end, "")
            if self._quote:
                self._at += sign == "\\"
                self._quote = "" if sign == self._quote else self._quote
            elif sign in self._quotes:
                self._quote = sign
            elif match and not self._depth and sign in self._stops:
                return match.start(), True
            elif match:
                self._depth += (sign in self._open) - (sign in self._close)
                if sign in self._close and self._depth <= 0:
                    return self._at, True
        return min(self._at, len(text)), False


_MOST_DIGITS = 1000
"""The most digits of an integer: Python refuses to read thousands."""


def n_begun(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that may begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def parsed(text: str) -> Any | None:
    """The JSON value of a text; None for invalid JSON, or a value that cannot be written again."""
    try:
        return json.loads(text, parse_constant=refuse_constant, parse_float=_finite, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    """A float; the largest of its sign for numbers beyond the range: `1e999` is JSON, infinity is not."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _MOST_DIGITS else _finite(text)


def written(value: Any) -> str | None:
    """The value as JSON that every encoder takes; None where it cannot be written."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value)
    except (ValueError, RecursionError):
        return None
    return text


_TYPES = {"NoneType": "null", "bool": "boolean", "int": "number", "float": "number", "str": "string"}
_TYPES |= {"list": "array", "tuple": "array"}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a JSON schema allows a value; empty: any. `root`: the schema with the definitions."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return types_of(target, root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            each = [types_of(option, root, depth + 1) for option in options]
            return frozenset().union(*each) if all(each) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and "type" not in schema:
        return frozenset(map(type_of, values))
    stated = schema.get("type")
    names = stated if isinstance(stated, list) else [stated]
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The schemas of an object's members, by key; empty where the schema of the object states none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def type_of(value: object) -> str:
    """The type of a value in terms of JSON schemas, with "number" for integers."""
    return _TYPES.get(type(value).__name__, "object")


_MOST_DEPTH = 32
_CDATA = ("<![CDATA[", "]]>")
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"']+)\s*:")


def typed(text: str, schema: Any, root: Mapping[str, Any], form: ArgumentForm, depth: int = 0) -> Any:
    """The value that a text means by `schema`, whose definitions are in `root`."""
    types = types_of(schema, root)
    if types == {"string"}:
        return text.removeprefix(_CDATA[0]).removesuffix(_CDATA[1]) if text.startswith(_CDATA[0]) else text
    stripped = text.strip()
    value = _value(stripped, schema, root, form, depth)
    if value == stripped or (types and type_of(value) not in types and "string" in types):
        return text
    return text if isinstance(value, str) and form.is_raw and types != {"array"} else value


def _value(text: str, schema: Any, root: Mapping[str, Any], form: ArgumentForm, depth: int) -> Any:
    """The value that a text means; the text itself, which no value equals, where it means none."""
    value = parsed(text)
    if value is None and depth < _MOST_DEPTH:
        value = _nested(text, schema, root, form, depth)
    if value is not None or text == "null":
        return value
    try:
        plain = ast.literal_eval(_Constants().visit(ast.parse(text, mode="eval")))
        return parsed(json.dumps(plain, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, LookupError, RecursionError, MemoryError):
        value = parsed(_with_quotes(text, form)) if text[:1] in ("{", "[") else None
    return text if value is None else value


def _nested(text: str, schema: Any, root: Mapping[str, Any], form: ArgumentForm, depth: int) -> Any:
    """An object or a list whose members are written like arguments; None for any other text."""
    before, behind = form.values["string"]
    if KEY not in behind or not text.startswith(form.opening):
        return None
    pairs: list[tuple[str, str]] = []
    place = 0
    while text.startswith(form.opening, place):
        place += len(form.opening)
        key_end = text.find(before, place)
        key = text[place : max(key_end, place)]
        closing = behind.replace(KEY, key)
        end = text.find(closing, key_end)
        if min(key_end, end) < 0:
            return None
        pairs.append((key, text[key_end + len(before) : end]))
        place = end + len(closing)
    if types_of(schema, root) == {"array"} or (len(pairs) > 1 and len({key for key, _ in pairs}) == 1):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [typed(item, items, root, form, depth + 1) for _, item in pairs]
    schemas = properties_of(schema)
    return {key: typed(item, schemas.get(key), root, form, depth + 1) for key, item in pairs}


def _with_quotes(text: str, form: ArgumentForm) -> str:
    """JSON of a value whose keys are bare and whose strings have other quotes."""
    quote = form.values["string"][1]
    pieces = text.split(quote) if len(quote) > 1 else [text]
    pieces[::2] = [_BARE_KEY.sub(lambda key: f"{key[1]}{json.dumps(key[2])}:", part) for part in pieces[::2]]
    pieces[1::2] = map(json.dumps, pieces[1::2])
    return "".join(pieces)


class _Constants(ast.NodeTransformer):
    """Replaces the names of JSON's constants by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])
