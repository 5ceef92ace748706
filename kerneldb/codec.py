"""The fields of records, flat or nested: what tables (`rows`) and files (`portable`) have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from phasewise.kerneldb.records import Problem, Schedule

T = TypeVar("T")
Getter: TypeAlias = Callable[[Any], Any]
"""Reads one value of a row."""

KEYED = (Problem, Schedule)
"""Records that many rows share: they have tables of their own and stay whole among flat fields."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record."""

    name: str
    record: type | None
    """The record that the field holds; None: a plain value."""
    is_list: bool = False
    """A plain value that JSON has as a list."""

    @property
    def is_flat(self) -> bool:
        """The field is one value among a record's flat fields."""
        return self.record is None or self.record in KEYED


def parts(record: Any) -> tuple[RecordField, ...]:
    """The fields of a record's type, in order."""
    return _parts(record)


@cache
def _parts(record: Any) -> tuple[RecordField, ...]:
    hints = get_type_hints(record)
    return tuple(
        RecordField(field.name, _record_in(hints[field.name]), get_origin(hints[field.name]) is tuple)
        for field in fields(cast(Any, record))
    )


def _record_in(hint: Any) -> type | None:
    """The record of a hint, such as Schedule of `Schedule | None`."""
    return next((candidate for candidate in (hint, *get_args(hint)) if is_dataclass(candidate)), None)  # type: ignore[return-value]


def flattened(record: object) -> dict[str, Any]:
    """All values by the names of their fields, those of records within it too."""
    kind: Any = type(record)
    names, get = _flat(kind)
    return dict(zip(names, get(record), strict=True))


def flat_names(record: Any) -> tuple[str, ...]:
    """The names that `flattened` gives to a record's values, in order."""
    return tuple(part.name for part in flat_parts(record))


def flat_parts(record: Any) -> tuple[RecordField, ...]:
    """The flat fields of a record and of the records within it, in order."""
    return tuple(
        inner for part in parts(record) for inner in ((part,) if part.is_flat else flat_parts(part.record))
    )


@cache
def _flat(record: Any) -> tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]:
    """The names of a record's flat fields, and what reads them all; every record has two or more."""
    return flat_names(record), attrgetter(*_paths(record))


def _paths(record: Any) -> tuple[str, ...]:
    return tuple(
        f"{part.name}.{inner}" if inner else part.name
        for part in parts(record)
        for inner in ((None,) if part.is_flat else _paths(part.record))
    )


def assembler(record: type[T], getter_of: Callable[[str], Getter]) -> Callable[[Any], T]:
    """Makes records of rows: `getter_of` names what reads a flat field of a row.

    What it makes raises RecordError where the record can hold none of a row's values.
    """
    getters = [
        getter_of(part.name) if part.is_flat else assembler(cast(type, part.record), getter_of)
        for part in parts(record)
    ]
    kind: Any = record
    if all(part.record is None for part in parts(kind)) and not _has_lists(kind):
        return lambda row: cast(T, shared(kind, *[get(row) for get in getters]))
    return lambda row: record(*[get(row) for get in getters])


def _has_lists(record: Any) -> bool:
    """Its plain values may be lists or mappings, which no cache can look up."""
    return any(get_origin(hint) in (tuple, Mapping) for hint in get_type_hints(record).values())


@lru_cache(maxsize=4096, typed=True)
def shared(record: Any, *values: Any) -> Any:
    """One record for all rows with the same values, such as a problem or a kind of machine: checked once."""
    return record(*values)


def as_tuples(value: Any) -> Any:
    """JSON's lists, and lists of lists, as the tuples that records want; they refuse anything else."""
    if not isinstance(value, list):
        return value
    if list in map(type, value):
        return tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)
    return tuple(value)
