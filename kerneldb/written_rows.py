"""A row of a file as canonical JSON: names in order, no white space, ASCII.

Text of what many rows share (a problem, a schedule, a kind of machine) is made once. The rest is put together
without an encoder, whose start takes longer than a row does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

from phasewise.kerneldb.codec import KEYED, parts
from phasewise.kerneldb.records import MachineKey, Origin, Sample

BESIDE = (Sample, Origin)
"""Records whose fields stand in a file beside those of the row."""

SHARED = (*KEYED, MachineKey)
"""Records of words and whole numbers, whose text is kept."""

Write: TypeAlias = Callable[[Any], str]

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: Mapping[str, Any]) -> str:
    """A JSON object as text; ValueError for a number that JSON has not."""
    return _ENCODER.encode(value)


def row_text(row: object) -> str:
    """The fields of a row. A kernel's build stands beside a row's own fields, whatever record has it."""
    kind: Any = type(row)
    return "{" + ",".join([name + write(row) for name, write in _writers(kind)]) + "}"


@cache
def _writers(record: Any) -> tuple[tuple[str, Write], ...]:
    """For each field of a file, in order, its name as it is written, and what writes it."""
    return tuple((f'"{name}":', write) for name, write in sorted(_fields(record, ""), key=lambda own: own[0]))


def _fields(record: Any, path: str) -> Iterator[tuple[str, Write]]:
    for part in parts(record):
        read = attrgetter(path + part.name)
        if part.record in BESIDE:
            yield from _fields(part.record, f"{path}{part.name}.")
        elif part.record is not None:
            if part.record not in KEYED and any(inner.name == "kernel_abi" for inner in parts(part.record)):
                yield "kernel_abi", _written_by(attrgetter(f"{path}{part.name}.kernel_abi"), _value_text)
            yield part.name, _written_by(read, _shared_text if part.record in SHARED else _record_text)
        elif part.name != "verified":
            yield part.name, _written_by(read, _value_text)


def _written_by(read: Callable[[Any], Any], write: Write) -> Write:
    return lambda row: write(read(row))


def _record_text(record: object) -> str:
    """Without its kernel's build, which stands beside it."""
    if record is None:
        return "null"
    own = (part.name for part in parts(type(record)) if part.name != "kernel_abi")
    return "{" + ",".join([f'"{name}":{_value_text(getattr(record, name))}' for name in sorted(own)]) + "}"


_shared_text = lru_cache(maxsize=4096)(_record_text)
_word_text = lru_cache(maxsize=1024)(_ENCODER.encode)


def _value_text(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return _word_text(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is tuple and set(map(type, value)) == {int}:
        return repr([*value]).replace(" ", "")
    if kind is dict:
        pairs = [f"{_word_text(name)}:{_value_text(value[name])}" for name in sorted(value)]
        return "{" + ",".join(pairs) + "}"
    return _ENCODER.encode(value)
