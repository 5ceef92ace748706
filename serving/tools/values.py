"""Values of arguments that are no JSON, as templates and models write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from phasewise.serving.text.turn_form import KEY, ArgumentForm, type_of, types_of
from phasewise.serving.tools.parts import parsed

_MOST_DEPTH = 32
_CDATA = ("<![CDATA[", "]]>")
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"']+)\s*:")


def typed(text: str, schema: Any, root: Mapping[str, Any], form: ArgumentForm, depth: int = 0) -> Any:
    """The value that a text means where its function's schema is `schema`, within `root`."""
    types = types_of(schema, root)
    if types == {"string"}:
        return text.removeprefix(_CDATA[0]).removesuffix(_CDATA[1]) if text.startswith(_CDATA[0]) else text
    is_read, value = _value(text.strip(), schema, root, form, depth)
    if not is_read or (types and type_of(value) not in types and "string" in types):
        return text
    return text if isinstance(value, str) and form.is_raw and types != {"array"} else value


def _value(
    text: str, schema: Any, root: Mapping[str, Any], form: ArgumentForm, depth: int
) -> tuple[bool, Any]:
    if text == "null":
        return True, None
    value = parsed(text)
    if value is not None:
        return True, value
    if depth < _MOST_DEPTH and (nested := _nested(text, schema, root, form, depth)) is not None:
        return True, nested
    try:
        plain = ast.literal_eval(_Constants().visit(ast.parse(text, mode="eval")))
        return True, parsed(json.dumps(plain, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, LookupError, RecursionError, MemoryError):
        pass
    value = parsed(_with_quotes(text, form)) if text[:1] in ("{", "[") else None
    return value is not None, value


def _nested(text: str, schema: Any, root: Mapping[str, Any], form: ArgumentForm, depth: int) -> Any:
    """An object or a list whose members are written as arguments are; None: it is not."""
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
    schema = schema if isinstance(schema, Mapping) else {}
    if types_of(schema, root) == {"array"} or (len(pairs) > 1 and len({key for key, _ in pairs}) == 1):
        return [typed(item, schema.get("items"), root, form, depth + 1) for _, item in pairs]
    properties = schema.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    return {key: typed(item, schemas.get(key), root, form, depth + 1) for key, item in pairs}


def _with_quotes(text: str, form: ArgumentForm) -> str:
    """JSON of a value whose keys are bare and whose strings have quotes of their own."""
    quote = form.values["string"][1]
    pieces = text.split(quote) if len(quote) > 1 else [text]
    pieces[::2] = [
        _BARE_KEY.sub(lambda key: f"{key[1]}{json.dumps(key[2])}:", piece) for piece in pieces[::2]
    ]
    pieces[1::2] = map(json.dumps, pieces[1::2])
    return "".join(pieces)


class _Constants(ast.NodeTransformer):
    """Names that JSON has for constants of Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])
