"""The one reader of JSON from outside: files, lines and answers of programs that are not ours.

Everything that it refuses is a ValueError of one line. Values are nested no deeper than `MOST_DEPTH`, and
numbers are whole numbers of 64 bits or finite floats: a longer whole number becomes a float, so that a check
for a whole number refuses it. `json.loads` has none of these bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

MOST_DEPTH = 200
"""Most levels of lists and objects; the reader of requests has the same limit."""
MOST_VALUES = 160 * 1024  # token ids of a long context
MOST_CONTAINERS = 64 * 1024
_COUNTED_AT_ONCE_BYTES = 256 * 1024
_SHORT_DIGITS = 18
_MOST_DIGITS = 310
_TOLD_CHARACTERS = 40


Pairs = list[tuple[str, Any]]


def read_json(
    text: str | bytes,
    *,
    object_of: Callable[[Pairs], Any] | None = None,
    constant_of: Callable[[str], Any] | None = None,
) -> Any:
    """Parse a JSON text; ValueError for what is not JSON or breaks the bounds. object_of: makes an object of
    its pairs. constant_of: makes a value of `NaN`, `Infinity` and `-Infinity`, which are refused without it.
    """
    try:
        value = json.loads(
            text,
            parse_constant=constant_of or refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=object_of,
        )
    except RecursionError:
        raise _too_deep() from None
    _refuse_depth(value)
    return value


def is_flood(raw: bytes) -> bool:
    """True if `raw` has more values, or more lists and objects, than one request may have.

    A JSON value costs far more memory than its bytes, so this check comes before parsing. Signs inside of
    texts are counted too; a text with that many of them is longer than any context.
    """
    n_values = n_containers = 0
    for start in range(0, len(raw), _COUNTED_AT_ONCE_BYTES):
        end = start + _COUNTED_AT_ONCE_BYTES
        n_values += raw.count(b",", start, end)
        n_containers += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        if n_values >= MOST_VALUES or n_containers > MOST_CONTAINERS:
            return True
    return False


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.{_TOLD_CHARACTERS}} is too large")
    return value


def _whole(text: str) -> int | float:
    if len(text) <= _SHORT_DIGITS:
        return int(text)
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large")
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 64 else _finite(text)


def with_unique_keys(pairs: Pairs) -> dict[str, Any]:
    """Make an object of its pairs, for `object_of`; ValueError for a key that comes twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has the same key twice")
    return fields


def infinity_of(name: str) -> float:
    """The infinity of a JSON constant, for `constant_of`, as Python writes it; ValueError for `NaN`."""
    return float(name) if name.endswith("Infinity") else refuse_constant(name)


def _refuse_depth(value: Any) -> None:
    """Refuse a value nested deeper than MOST_DEPTH, without recursion: printing it takes calls by depth."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | dict)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MOST_DEPTH} levels")


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite, parse_int=_whole)
"""Decoder of a JSON value at the beginning of a longer text; it does not check the value's depth."""
