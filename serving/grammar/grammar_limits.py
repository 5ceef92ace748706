"""Limits of grammars from requests, checked before a grammar is compiled, in linear time. The bounds keep
compilation and each step to milliseconds, and references from overflowing the compiler's stack."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import RequestError

MOST_SCHEMA_BYTES = 64 * 1024
MOST_SCHEMA_DEPTH = 64
MOST_SCHEMA_VALUES = 5000
MOST_REFERENCES = 256
MOST_PROPERTIES = 400  # of one object; the parser's rows hold four items for each that may be left out
MOST_TEXT_CHARACTERS = 4096  # of one key, value or pattern inside a schema
MOST_PATTERN_CHARACTERS = 4096  # with its repetitions written out: (a{10}){3} counts 30
MOST_CHOICES = 1000
MOST_INTERSECTION = 1 << 18
"""Most automaton states, roughly: constraints that must hold together on one value multiply."""
_LARGEST_STEP = 2**53
JSON_OPTIONS = {
    # A small model that may write any amount of space sometimes writes nothing else.
    "whitespace_pattern": r"( |\n[ \t]{0,32})",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": True,
}
"""Llguidance's options for all JSON that a grammar describes."""

_ESCAPE = re.compile(r"\\[pPxu]\{[^}]*\}|\\.?", re.DOTALL)
_QUANTIFIER = re.compile(r"\{(\d{0,18})(,?)(\d{0,18})\}")


def checked_schema(schema: Any) -> str:
    """The schema as compact JSON. RequestError: it breaks a bound, which the message names."""
    if not isinstance(schema, dict):
        raise RequestError("a schema must be a JSON object")
    depth = 0
    level: list[Any] = [schema]
    levels: list[list[Any]] = []
    n_values = n_pattern_characters = 0
    references: set[str] = set()
    while level:
        depth += 1
        levels.append(level)
        if depth > MOST_SCHEMA_DEPTH:
            raise RequestError(
                f"the schema is nested deeper than {MOST_SCHEMA_DEPTH} levels; make it flatter"
            )
        n_values += len(level)
        if n_values > MOST_SCHEMA_VALUES:
            raise RequestError(f"the schema has more than {MOST_SCHEMA_VALUES} values; make it smaller")
        for value in level:
            n_pattern_characters += _check_value(value, references)
        if n_pattern_characters > MOST_PATTERN_CHARACTERS:
            raise RequestError(
                f"the schema's patterns, repetitions written out, have more than {MOST_PATTERN_CHARACTERS} "
                "characters together; make them shorter"
            )
        level = [child for value in level for child in _children(value)]
    if len(references) > MOST_REFERENCES:
        raise RequestError(f"the schema has more than {MOST_REFERENCES} different references; use fewer")
    _check_intersections(levels)
    return _written(schema)


def checked_pattern(pattern: str) -> str:
    """The pattern itself. RequestError: it is too long with its repetitions written out."""
    if pattern_weight(pattern) > MOST_PATTERN_CHARACTERS:
        raise RequestError(
            f"the pattern, its repetitions written out, has more than {MOST_PATTERN_CHARACTERS} characters; "
            "make it shorter"
        )
    return pattern


_BOUNDARIES = re.compile(r"(\\\\)|\\[bB]")
_UNHOLDABLE = re.compile(r"\(\?(?:[=!]|<[=!]|P=|>)|(?<!\\)\\[AGZz1-9]|[^(|\[\\]\^|(?<!\\)\$[^)|]")
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"enum", "const", "default", "examples"})


def holdable(schema: Any) -> Any:
    """The schema with only patterns that the grammar engine supports: word boundaries are removed from
    patterns, and patterns with lookaround or of invalid syntax are dropped."""
    if isinstance(schema, list):
        return [holdable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: value if key in _VALUES else holdable(value) for key, value in schema.items()}
    if isinstance(schema.get("pattern"), str):
        pattern = _BOUNDARIES.sub(r"\1", schema["pattern"])
        if _can_be_held(pattern):
            out["pattern"] = pattern
        else:
            del out["pattern"]
    named = out.get("patternProperties")
    if isinstance(named, dict):
        out["patternProperties"] = {key: value for key, value in named.items() if _can_be_held(key)}
    return out


def keywords_of(schema: Any) -> Iterator[str]:
    """Yield every keyword in a schema and its subschemas."""
    if isinstance(schema, list):
        for item in schema:
            yield from keywords_of(item)
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            if key not in _VALUES:
                by_name = key in _BY_NAME and isinstance(value, dict)
                yield from keywords_of(list(value.values()) if by_name else value)


def _can_be_held(pattern: str) -> bool:
    if _UNHOLDABLE.search(pattern):
        return False
    try:
        re.compile(re.sub(r"\\[pP]\{\w+\}", "a", pattern))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def checked_choices(choices: list[str]) -> str:
    """A pattern that matches exactly these texts. RequestError: there are too many."""
    if len(choices) > MOST_CHOICES:
        raise RequestError(
            f"there are {counted(len(choices), 'choice')}; at most {MOST_CHOICES} can be offered"
        )
    n_characters = sum(map(len, choices))
    if n_characters > MOST_SCHEMA_BYTES:
        raise RequestError(
            f"the choices have {counted(n_characters, 'character')}; at most {MOST_SCHEMA_BYTES} can be"
        )
    return "|".join(f"(?:{re.escape(choice)})" for choice in choices)


def pattern_weight(pattern: str) -> int:
    """Characters of a regular expression with counted repetitions written out; an upper bound."""
    sums, last = [0], 0  # of the groups that are open; the weight of the atom that a quantifier would repeat
    position = 0
    while position < len(pattern):
        character = pattern[position]
        quantifier = _QUANTIFIER.match(pattern, position) if character == "{" else None
        if quantifier is not None:
            times = max(int(quantifier[1] or 0), int(quantifier[3] or 0), 1)
            sums[-1] += last * (times - 1)
            last *= times
            position = quantifier.end()
            continue
        if character == "(":
            sums.append(0)
            position += 1
            continue
        last = max(1, sums.pop()) if character == ")" and len(sums) > 1 else 1
        sums[-1] += last
        position = _atom_end(pattern, position)
    return sum(sums)


def _atom_end(pattern: str, position: int) -> int:
    """End of the character, escape or class that begins at `position`."""
    if pattern[position] == "\\":
        escape = _ESCAPE.match(pattern, position)
        return escape.end() if escape else position + 1
    if pattern[position] != "[":
        return position + 1
    position += 3 if pattern[position + 1 : position + 2] == "^" else 2  # a ] that comes first is itself
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_value(value: Any, references: set[str]) -> int:
    """Check one value of the schema, note its reference, and return the characters of its patterns."""
    if isinstance(value, str):
        _check_text(value)
    if not isinstance(value, dict):
        return 0
    for key in value:
        _check_text(key)
    reference, pattern = value.get("$ref"), value.get("pattern")
    if isinstance(reference, str):
        references.add(reference)
    properties, patterns = value.get("properties"), value.get("patternProperties")
    if isinstance(properties, dict) and len(properties) > MOST_PROPERTIES:
        raise RequestError(
            f"an object of the schema has {counted(len(properties), 'property')};"
            f" at most {MOST_PROPERTIES} can be kept"
        )
    named = [pattern] if isinstance(pattern, str) else []
    if isinstance(patterns, dict):
        named += patterns
    return sum(map(pattern_weight, named))


def _check_intersections(levels: list[list[Any]]) -> None:
    """Refuse a schema that puts too many constraints on one value. `levels`: values by depth."""
    weights: dict[int, int] = {}
    for level in reversed(levels):
        for value in level:
            if isinstance(value, dict):
                weights[id(value)] = weight = _intersection(value, weights)
                if weight > MOST_INTERSECTION:
                    raise RequestError(
                        "the schema holds one value to too many patterns, multiples or alternatives "
                        "at a time; use fewer of them together"
                    )


def _intersection(schema: dict[str, Any], weights: dict[int, int]) -> int:
    """Combined weight of the constraints on one value: alternatives add up, all others multiply."""

    def parts(name: str) -> list[int]:
        listed = schema.get(name)
        return [weights.get(id(part), 1) for part in listed] if isinstance(listed, list) else []

    pattern = schema.get("pattern")
    weight = _n_remainders(schema.get("multipleOf"))
    weight *= pattern_weight(pattern) or 1 if isinstance(pattern, str) else 1
    for part in (*parts("allOf"), sum(parts("anyOf")), sum(parts("oneOf"))):
        weight = min(weight * max(1, part), MOST_INTERSECTION + 1)
    return weight


def _n_remainders(step: Any) -> int:
    """Automaton states for the multiples of `step`: its digits without point and trailing zeros."""
    if (
        isinstance(step, bool)
        or not isinstance(step, int | float)
        or not -_LARGEST_STEP < step < _LARGEST_STEP
    ):
        return 1  # llguidance refuses it
    digits = Decimal(repr(step)).normalize().as_tuple().digits
    return max(1, int("".join(map(str, digits))))


def _check_text(text: str) -> None:
    if len(text) > MOST_TEXT_CHARACTERS:
        raise RequestError(f"a text in the schema is longer than {MOST_TEXT_CHARACTERS} characters")


def _written(schema: Any) -> str:
    try:
        text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise RequestError(f"the schema is not JSON: {error}") from error
    if len(text) > MOST_SCHEMA_BYTES:
        raise RequestError(f"the schema is larger than {MOST_SCHEMA_BYTES} bytes; make it smaller")
    return text
