"""Fields of records: the values that each may hold, checked when a record is made, and walks over them.

A field's annotation holds its check. Nothing here knows SQL, or any one record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeAlias, get_args, get_type_hints

from phasewise._words import number
from phasewise.kerneldb.errors import RecordError

MAX_DIMENSION = 2**31 - 1
MAX_NS = 2**63 - 1
MAX_SAMPLES = 100_000
MAX_TEXT = 255
MAX_PLAN_CHARS = 100_000
MAX_PAIRS = 32
"""Most arguments, or most parameters, of a user's kernel."""


@dataclass(frozen=True)
class Whole:
    """Check of a field: a whole number within bounds."""

    low: int
    high: int

    def __call__(self, name: str, value: object) -> object:
        if type(value) is not int or not self.low <= value <= self.high:
            raise RecordError(
                f"{name} must be a whole number from {self.low} to {self.high}, not {value!r:.80}"
            )
        return value


@dataclass(frozen=True)
class Finite:
    """Check of a field: a finite float within bounds."""

    low: float = -math.inf
    high: float = math.inf

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, float) or not math.isfinite(value) or not self.low <= value <= self.high:
            bounds = "" if self.low == -math.inf else f" of at least {number(self.low)}"
            bounds += "" if self.high == math.inf else f" and at most {number(self.high)}"
            raise RecordError(f"{name} must be a finite number{bounds}, not {value!r:.80}")
        return value


@dataclass(frozen=True)
class Truth:
    """Check of a field: True or False."""

    def __call__(self, name: str, value: object) -> object:
        if type(value) is not bool:
            raise RecordError(f"{name} must be true or false, not {value!r:.80}")
        return value


@dataclass(frozen=True)
class Characters:
    """Check of a field: text that a pattern matches, with a limit of characters."""

    most: int
    what: str
    """The expected text in words, for messages."""
    pattern: re.Pattern[str]

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, str) or len(value) > self.most or not self.pattern.fullmatch(value):
            raise RecordError(f"{name} must be {self.what}, not {value!r:.80}")
        return value


@dataclass(frozen=True)
class Samples:
    """Check of a field: raw samples in the order taken, in nanoseconds per call or per step."""

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, tuple) or not 1 <= len(value) <= MAX_SAMPLES:
            raise RecordError(f"{name} must be a tuple of 1 to {MAX_SAMPLES} numbers")
        if set(map(type, value)) != {int} or min(value) < 1 or max(value) > MAX_NS:
            for sample in value:
                _NS(f"a sample in {name}", sample)
        return value


@dataclass(frozen=True)
class Numbers:
    """Check of a field: a mapping of words to finite numbers, of which a copy is kept."""

    most: int

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, Mapping) or len(value) > self.most:
            raise RecordError(f"{name} must be a mapping of at most {self.most} words to numbers")
        for word, figure in value.items():
            _WORD(f"a name in {name}", word)
            _FINITE(f"{word} in {name}", figure)
        return dict(value)


@dataclass(frozen=True)
class Pairs:
    """Check of a field: names with whole numbers, in the order of a kernel's text."""

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, tuple):
            raise RecordError(f"{name} must be a list of pairs")
        if len(value) > MAX_PAIRS:
            raise RecordError(f"{name} must be at most {MAX_PAIRS} names with whole numbers")
        for pair in value:
            if not isinstance(pair, tuple) or len(pair) != 2 or type(pair[0]) is not str or len(pair[0]) > 32:
                raise RecordError(f"{name} must be names of at most 32 characters with whole numbers")
            _PAIRED(f"{pair[0]} in {name}", pair[1])
        return value


Check: TypeAlias = Whole | Finite | Truth | Characters | Samples | Numbers | Pairs

_NS, _FINITE, _PAIRED = Whole(1, MAX_NS), Finite(), Whole(-(2**31), MAX_DIMENSION)
_WORD = Characters(32, "a lower-case word of at most 32 characters", re.compile(r"[a-z][a-z0-9_]*"))
_LINE = Characters(
    MAX_TEXT, f"1 to {MAX_TEXT} printable ASCII characters", re.compile(r"[!-~](?:[ -~]*[!-~])?")
)
# No half of a pair, which SQLite cannot keep, and no zero, which PostgreSQL cannot.
_KEY = re.compile(r"(?=[^\ud800-\udfff]*\Z)\S(?:[^\x00-\x1f\x7f-\x9f]*\S)?")
_PLAN = Characters(
    MAX_PLAN_CHARS,
    f"text of 1 to {MAX_PLAN_CHARS} characters without zeros and halves of characters",
    re.compile(r"[^\x00\ud800-\udfff]+"),
)


Word = Annotated[str, _WORD]
Line = Annotated[str, _LINE]
Key = Annotated[str, Characters(MAX_TEXT, f"1 to {MAX_TEXT} characters in a line", _KEY)]
PlanJson = Annotated[str, _PLAN]
"""A service plan, opaque here: `tuner.plans` reads and checks it."""
SamplesNs = Annotated[tuple[int, ...], Samples()]
EstimateNs = Annotated[int, _NS]
"""Nanoseconds: a robust estimate over samples."""
Conditions = Annotated[Mapping[str, float], Numbers(16)]
"""The surroundings of a timing that the timer noticed, e.g. `steal_share`, `mhz`, `load`."""
Figures = Annotated[Mapping[str, float], Numbers(64)]
Choice: TypeAlias = Annotated[tuple[tuple[str, int], ...], Pairs()]
"""A value for each parameter of a user's kernel, in the order of the kernel's text."""


# ---- fields of records ------------------------------------------------------------------------------------


class CheckedRecord:
    """Base of records, whose fields are checked when one is made: RecordError names field, value, bounds."""

    __slots__ = ()
    has_table: ClassVar[bool] = False
    """True if many rows share a record: it has its own table and stays whole among flat fields."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check, may_be_none in _checks(kind):
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            checked = check(name, value)
            if checked is not value:
                object.__setattr__(self, name, checked)
        self._check_whole()

    def _check_whole(self) -> None:
        """Check the relations between fields; RecordError where they do not hold."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """The name, the type and the check of one field of a record."""

    name: str
    record: Any
    """The type of record that the field holds; None for a plain value."""
    check: Check | None
    """The check of a plain value; None for a record."""
    may_be_none: bool

    @property
    def is_flat(self) -> bool:
        """True if the field is one value, or one shared record, among a record's flat fields."""
        return self.record is None or self.record.has_table


@cache
def parts(record: Any) -> tuple[RecordField, ...]:
    """The fields of a record's type, in order."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(_part(own.name, hints[own.name]) for own in fields(record))


def _part(name: str, hint: Any) -> RecordField:
    choices = (hint, *get_args(hint))
    records = (own for own in choices if isinstance(own, type) and issubclass(own, CheckedRecord))
    record = next(records, None)
    check = next(iter(getattr(hint, "__metadata__", ())), None)
    return RecordField(
        name, record, check, type(None) in (*choices, *get_args(choices[1] if check else None))
    )


@cache
def _checks(record: Any) -> tuple[tuple[str, Check, bool], ...]:
    return tuple((part.name, part.check, part.may_be_none) for part in parts(record) if part.check)


@cache
def flat_parts(record: Any) -> tuple[RecordField, ...]:
    """The flat fields of a record and of the records within it, in order: the columns of its table."""
    return tuple(
        inner for part in parts(record) for inner in ((part,) if part.is_flat else flat_parts(part.record))
    )


def flattened(record: object) -> dict[str, Any]:
    """The values of a record and of the records within it, by the names of their flat fields."""
    kind: Any = type(record)
    names, read = _flat(kind)
    return dict(zip(names, read(record), strict=True))


@cache
def _flat(record: Any) -> tuple[tuple[str, ...], attrgetter[Any]]:
    """The names of a record's flat fields, and a getter of all their values; every record has two or more."""
    return tuple(part.name for part in flat_parts(record)), attrgetter(*_paths(record))


def _paths(record: Any) -> Iterator[str]:
    for part in parts(record):
        yield from (part.name,) if part.is_flat else (f"{part.name}.{path}" for path in _paths(part.record))


@cache
def is_shared(record: Any) -> bool:
    """True for a record of only words and whole numbers, such as a problem: many rows have an equal one."""
    return all(isinstance(part.check, Characters | Whole) for part in parts(record))


@lru_cache(maxsize=4096, typed=True)
def shared(record: Any, *values: Any) -> Any:
    """Make a record such as a problem once, and return it for all rows with the same values."""
    return record(*values)


def made(record: Any, *values: Any) -> Any:
    """Make the record of these values, or return the RecordError that says why they make none."""
    try:
        return shared(record, *values)
    except RecordError as error:
        return error
