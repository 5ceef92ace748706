"""Grammars of calls in the form in which a model's template writes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from phasewise.serving.grammar.grammar_limits import JSON_OPTIONS, checked_schema, holdable
from phasewise.serving.text.turn_form import ID, INDEX, KEY, KINDS, NAME, ArgumentForm, Around, Kind, TurnForm
from phasewise.serving.tools.values import properties_of, types_of

MOST_CALLS = 16
"""The most calls of an answer that must call: a small model may otherwise go on for ever."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters`: a JSON schema of an object; {}: not described."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    """True to refuse a schema that cannot be enforced in full; else it is enforced as far as possible."""


class Wanted(NamedTuple):
    """The calls that an answer may have. `or_document`: a Lark rule for an answer without calls."""

    functions: Sequence[Function]
    most_calls: int = MOST_CALLS
    or_document: str = ""


_TERMINALS = (("SPACE", r"/[ \n]{1,2}/"), ("ID", "/[A-Za-z0-9]{9}/"), ("INDEX", "/[0-9]{1,4}/"))
_NEWLINES = re.compile(r"[\r\n]")
_ANY = r"(.|\n)*"
_DEFINITIONS = ("$defs", "definitions")
_LINES = r"\s*\n\s*"
_UNKEPT = re.compile(r"\\[bBAZzGKkpP\d]|\(\?|[\^$]")
"""Constructs that are not supported in the pattern of a string written without quotes."""


def arguments_rule(function: Function) -> str:
    """A Lark rule for the JSON of a function's arguments. RequestError where the schema is too large."""
    return json_rule(function.parameters or {"type": "object"}, lenient=not function.is_strict)


def json_rule(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A Lark rule for JSON of a schema. `lenient`: leave out keywords that the engine cannot enforce."""
    checked_schema(dict(schema))
    schema = holdable(dict(schema)) if lenient else schema
    own = {key: value for key, value in schema.items() if key != "x-guidance"}
    if "type" not in own and not {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"} & own.keys():
        own["type"] = "object"
    return "%json " + json.dumps({**own, "x-guidance": {**JSON_OPTIONS, "lenient": lenient}})


class CallGrammar:
    """Llguidance's Lark for calls in the form of `turn`. `control`: ids of control tokens by their texts."""

    def __init__(self, turn: TurnForm, control: Mapping[str, int]) -> None:
        assert turn.call is not None
        self._turn, self._form = turn, turn.call
        self._spellings = {ID: "ID", INDEX: "INDEX", **{text: f"<[{id}]>" for text, id in control.items()}}
        marks = sorted(self._spellings, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join([_LINES, *map(re.escape, marks)])})")
        self._rules: list[tuple[str, str]] = []

    def of(self, wanted: Wanted) -> str:
        """The grammar of one or more calls, from their mark on. RequestError where a schema is too large."""
        form, most = self._form, wanted.most_calls
        names = [f"call_{number}" for number in range(len(wanted.functions))]
        self._rules = [*_TERMINALS, ("call", " | ".join(names))]
        for name, function in zip(names, wanted.functions, strict=True):
            self._call(name, function)
        opening = form.section[0].lstrip()
        space = self._spelled(form.opening[: len(form.opening) - len(form.opening.lstrip())])
        start = f"{self._spelled(opening)} {space} call" if opening else "call"
        if self._turn.is_channelled:  # one call: its end ends the turn
            thought = " THOUGHT ".join(map(self._spelled, self._turn.thought))
            self._rules += [("thought", thought), ("THOUGHT", f"/{_ANY}/")]
            start, most = f"thought? {start}", 1
        if most > 1:
            start += f" ({self._spelled(form.separator)} {space} call){{0,{most - 1}}}"
        start = f"{start} {self._spelled(form.section[1])}"
        if wanted.or_document:
            start += " | document"
            self._rules.append(("document", wanted.or_document))
        lines = ["%llguidance {}", f"start: {start}", *(f"{name}: {body}" for name, body in self._rules)]
        return "\n".join(lines) + "\n"

    def _spelled(self, pattern: str, *, keep_end: bool = False, keep_start: bool = False) -> str:
        """Lark for a pattern. Line ends within it are optional, unless they touch a value."""
        out: list[str] = []
        pieces = [piece for piece in self._marks.split(pattern) if piece]
        for number, piece in enumerate(pieces):
            is_edge = (keep_start and number == 0) or (keep_end and number == len(pieces) - 1)
            is_line_end = "\n" in piece and piece.isspace() and not is_edge
            out.append(self._spellings.get(piece) or ("SPACE?" if is_line_end else json.dumps(piece)))
        return " ".join(out)

    def _call(self, name: str, function: Function) -> None:
        form, body = self._form, f"arguments_{name}"
        if form.argument is None:
            self._rules.append((body, arguments_rule(function)))
        else:
            body = self._arguments(name, function, form.argument)
        opening = self._spelled(form.opening.lstrip().replace(NAME, function.name))
        self._rules.append((name, f"{opening} {body} {self._spelled(form.closing)}"))

    def _arguments(self, name: str, function: Function, argument: ArgumentForm) -> str:
        """Rules for the arguments in the order of the schema, from the first that is present."""
        json_rule(function.parameters or {"type": "object"}, lenient=True)  # checks the whole schema's size
        keys = [key for key in properties_of(function.parameters) if not _NEWLINES.search(key)]
        required = function.parameters.get("required")
        separator, options, following = self._spelled(argument.separator), ['""'], '""'
        for index, key in reversed(list(enumerate(keys))):
            given, rest = f"{name}_{index}", f"{name}_after_{index}"
            self._rules += [(given, self._argument(given, key, function, argument)), (rest, following)]
            is_needed = isinstance(required, list) and key in required
            options = [f"{given} {rest}", *([] if is_needed else options)]
            following = f"{separator} {given} {rest}" + ("" if is_needed else f" | {rest}")
        return f"({' | '.join(options)})"

    def _argument(self, name: str, key: str, function: Function, argument: ArgumentForm) -> str:
        root = function.parameters
        stated = root["properties"][key]
        schema: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
        types = types_of(schema, root) or frozenset(("string",))
        shapes: dict[tuple[Around, bool], Kind] = {}
        for kind in KINDS:
            if kind in types or (kind == "object" and "null" in types):
                shapes.setdefault((argument.values[kind], kind == "string" and argument.is_raw), kind)
        options: list[str] = []
        for (around, is_raw), kind in shapes.items():
            before, behind = (text.replace(KEY, key) for text in around)
            body = f"{name}_{kind}"
            head = self._spelled(argument.opening + key + before, keep_end=True)
            if is_raw:
                options.append(f"{head} {self._text(body, behind, schema)}")
                continue
            shared = {part: root[part] for part in _DEFINITIONS if part in root}
            whole = {**shared, **_without_strings(schema, argument)}
            self._rules.append((body, json_rule(whole, lenient=not function.is_strict)))
            options.append(f"{head} {body} {self._spelled(behind, keep_start=True)}")
        return " | ".join(options)

    def _text(self, name: str, behind: str, schema: Mapping[str, Any]) -> str:
        """A rule for a string without quotes, and the mark behind it."""
        end = self._spelled(behind, keep_start=True)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            texts = [json.dumps(value) for value in values if isinstance(value, str)]
            return f"({' | '.join(texts)}) {end}" if texts else end
        plain = "".join(takewhile(lambda piece: piece not in self._spellings, self._marks.split(behind)))
        pattern, _ = _pattern_of(schema)
        sign = re.escape(plain.lstrip("\n")[:1] or plain[:1]) if len(plain.strip()) == 1 else ""
        if plain and not (pattern or sign):
            self._rules.append((f"{name}[suffix={json.dumps(plain)}]", f"/{_ANY}/"))
            return f"{name} {self._spelled(behind[len(plain) :])}"
        body = pattern or (rf"[^{sign}\\\n]*" if sign else _ANY)
        self._rules.append((name.upper(), f"/{body}/"))
        return f"{name.upper()} {end}"


def unheld_texts(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Keywords of string arguments that a grammar cannot enforce where strings stand without quotes."""
    for schema in properties_of(parameters).values():
        if isinstance(schema, Mapping) and not {"enum", "const"} & schema.keys():
            stated = {"pattern", "minLength", "maxLength", "format"} & schema.keys()
            yield from stated.difference(_pattern_of(schema)[1])


def _pattern_of(schema: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """A pattern for strings of this schema, as far as enforceable, and the keywords that it enforces."""
    pattern, most = schema.get("pattern"), schema.get("maxLength")
    if isinstance(pattern, str):
        inner = pattern.removeprefix("^").removesuffix("$")
        if not _UNKEPT.search(inner) and pattern.startswith("^") and pattern.endswith("$"):
            return inner.replace("/", r"\/"), ("pattern",)
    if isinstance(most, int) and 0 <= most <= 256:
        least = schema.get("minLength")
        least = least if isinstance(least, int) and 0 <= least <= most else 0
        return f"[^<]{{{least},{most}}}", ("minLength", "maxLength")
    return "", ()


def _without_strings(schema: Mapping[str, Any], argument: ArgumentForm) -> dict[str, Any]:
    """The schema of an argument's values without strings, where strings have a form of their own."""
    out = dict(schema)
    if argument.is_raw:
        if isinstance(out.get("type"), list):
            out["type"] = [name for name in out["type"] if name != "string"]
        if isinstance(out.get("enum"), list):
            out["enum"] = [value for value in out["enum"] if not isinstance(value, str)]
        for key in ("anyOf", "oneOf"):
            if isinstance(out.get(key), list):
                out[key] = [option for option in out[key] if types_of(option, schema) != {"string"}]
    return out
