"""The fields of records, flat or nested: what tables (`rows`) and files (`portable`) have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from phasewise.kerneldb.records import Problem, Schedule

T = TypeVar("T")

KEYED = (Problem, Schedule)
"""Records that many rows share: they have tables of their own and stay whole among flat fields."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record."""

    name: str
    record: type | None
    """The record that the field holds; None: a plain value."""

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
        RecordField(field.name, _record_in(hints[field.name])) for field in fields(cast(Any, record))
    )


def _record_in(hint: Any) -> type | None:
    """The record of a hint, such as Schedule of `Schedule | None`."""
    return next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)  # type: ignore[return-value]


def flattened(record: object) -> dict[str, Any]:
    """All values by the names of their fields, those of records within it too."""
    flat: dict[str, Any] = {}
    for part in parts(type(record)):
        value = getattr(record, part.name)
        flat |= {part.name: value} if part.is_flat else flattened(value)
    return flat


def assembled(record: type[T], value_of: Callable[[str], Any]) -> T:
    """The record whose flat fields these are. RecordError where it can hold none of them."""
    return record(
        **{
            part.name: as_tuples(value_of(part.name))
            if part.is_flat
            else assembled(cast(type, part.record), value_of)
            for part in parts(record)
        }
    )


def as_tuples(value: Any) -> Any:
    """JSON's lists, and lists of lists, as the tuples that records want; they refuse anything else."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)
