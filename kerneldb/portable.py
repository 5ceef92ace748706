"""Schedules as a file that can be published: JSON lines, deterministic, versioned, checksummed.

    {"file": "phasewise schedules", "version": 1}
    {"measurement": {...}, "sha256": "16 digits"}       one line a timing, each with a checksum of its own
    {"promotion": {...}, "sha256": "16 digits"}         and a line for each schedule that was taken into use
    {"storage_duel": {...}, "sha256": "16 digits"}      and for each comparison of sparse with dense storage
    {"plan": {...}, "sha256": "16 digits"}              and for each plan: it names a model
    {"predictor_score": {...}, "sha256": "16 digits"}   and for each score of a predictor: it names a model
    {"user_timing": {...}, "sha256": "16 digits"}       only where asked for: they name users' functions
    {"user_promotion": {...}, "sha256": "16 digits"}    the same
    {"step_time": {...}, "sha256": "16 digits"}         only where asked for: they name models
    {"rows": 2, "sha256": "64 digits"}                  over all bytes before this line

The same rows give the same bytes, in whatever order and database they were kept. Whether a row is trusted
is a database's own business and is not written: everything that comes from elsewhere is unverified. Plans
name places of the topology, not cores (`topology.places`); an earlier version kept cores, and such a plan
goes out where `as_shared` can name its places. Step times go out where their owner asks for it.

A file may come from a stranger. It is read line by line, in bounded memory; a line that is not one of ours
is refused with a reason, and the others are taken. Nothing that is in the database is touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import Any, BinaryIO, TypeAlias, cast

from phasewise._words import counted
from phasewise.kerneldb.codec import KEYED, RecordField, as_tuples, parts, shared
from phasewise.kerneldb.errors import ExportFileError, RecordError
from phasewise.kerneldb.records import (
    MachineKey,
    Measurement,
    Origin,
    PlanRecord,
    PredictorScore,
    Problem,
    Promotion,
    Sample,
    Schedule,
    StepTime,
    StorageDuel,
)
from phasewise.kerneldb.rows import Shared, Unbuilt
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.summaries import summary_of
from phasewise.kerneldb.user_kernels import UserProblem, UserPromotion, UserTiming

Row: TypeAlias = Shared
Refuse: TypeAlias = Callable[[int, str], None]
"""Gets the number of a line, from 1, and why it is not taken."""

FILE = "phasewise schedules"
VERSION = 1

MAX_ROWS = 10_000_000
MAX_LINE_BYTES = 4 * 2**20
"""Twice a row with as many and as long samples as a record may have."""
MAX_SKIPPED_BYTES = 256 * 2**20
"""Most bytes of a longer line that are read past; a device, say, gives zeros without end."""

ROWS_AT_ONCE = 2000
"""Are appended in one transaction, so that other writers need not wait long."""

ROW_DIGITS = 16
MAX_REASON_CHARS = 200

KINDS: dict[str, type[Row]] = {
    "measurement": Measurement,
    "plan": PlanRecord,
    "predictor_score": PredictorScore,
    "promotion": Promotion,
    "storage_duel": StorageDuel,
    "step_time": StepTime,
    "user_timing": UserTiming,
    "user_promotion": UserPromotion,
}
"""The rows of a file, by the word that each line begins with."""
ALL = frozenset({PlanRecord, PredictorScore, StepTime, UserTiming, UserPromotion})
"""Rows that name something of their owner: models, or functions."""
_WORDS = {record: word for word, record in KINDS.items()}


BESIDE = (Sample, Origin)
"""Records whose fields stand in a file beside those of the row."""

SHARED = (*KEYED, MachineKey)
"""Records of words and whole numbers, whose text is kept."""

Write: TypeAlias = Callable[[Any], str]

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Taken:
    """The fate of the rows of a file or of another database."""

    read: int
    added: int

    @property
    def known(self) -> int:
        """Rows that were there already."""
        return self.read - self.added


def groups_of(
    store: Store,
    wanted: Callable[[MachineKey], bool] = lambda _: True,
    also: Collection[type[Row]] = ALL,
    as_shared: Callable[[PlanRecord], PlanRecord | None] = lambda plan: plan,
) -> Iterator[list[Row]]:
    """Every timing, promotion and storage duel of the machines that are wanted, in the order of a file.

    also: plans, scores of predictors and step times, which name models, and what is known of users' kernels,
    which names their functions. as_shared: a plan as it goes out, None where it cannot.
    """
    for _, record in sorted(KINDS.items()):
        if record in also or record not in ALL:
            for group in store.grouped(record, wanted):
                yield (
                    group
                    if record is not PlanRecord
                    else [shown for plan in group if (shown := as_shared(plan)) is not None]
                )


def in_use_groups(
    store: Store,
    wanted: Callable[[MachineKey], bool] = lambda _: True,
    also: Collection[type[Row]] = ALL,
    as_shared: Callable[[PlanRecord], PlanRecord | None] = lambda plan: plan,
) -> Iterator[list[Row]]:
    """As `groups_of`, but only the newest timing and promotion of what is in use, with five samples each.

    All of them are in memory; they are as many as there are problems.
    """
    timings = [_summarised(row) for row in store.promoted_measurements() if wanted(row.origin.machine)]
    yield [*timings]
    rest = groups_of(store, wanted, also, as_shared)
    chosen = {(row.problem, row.origin.machine, row.kernel_abi, row.sample.schedule) for row in timings}
    for group in rest:
        if isinstance(group[0] if group else None, Promotion):
            newest = {
                key: row
                for row in group
                if isinstance(row, Promotion)
                and row.origin.verified
                and (key := (row.problem, row.origin.machine, row.kernel_abi, row.schedule)) in chosen
            }
            yield [*newest.values()]
        elif not isinstance(group[0] if group else None, Measurement):
            yield group


def _summarised(row: Measurement) -> Measurement:
    return replace(row, sample=replace(row.sample, samples_ns=tuple(summary_of(row.sample.samples_ns))))


def rows_of(
    store: Store,
    wanted: Callable[[MachineKey], bool] = lambda _: True,
    also: Collection[type[Row]] = ALL,
) -> Iterator[Row]:
    """The rows of `groups_of`, one after the other."""
    return chain.from_iterable(groups_of(store, wanted, also))


def export_lines(groups: Iterable[Iterable[Row]]) -> Iterator[str]:
    """The lines of a file with these rows, each with its line end. ASCII only.

    Groups come in the order of a file (`groups_of`); one of them at a time is in memory.
    """
    digest = hashlib.sha256()
    count = 0
    for line in chain([canonical({"file": FILE, "version": VERSION})], _row_lines(groups)):
        if count > MAX_ROWS:
            raise ExportFileError(too_many(count))
        digest.update(f"{line}\n".encode())
        count += 1
        yield f"{line}\n"
    yield canonical({"rows": count - 1, "sha256": digest.hexdigest()}) + "\n"


def too_many(count: int) -> str:
    """Says that a file holds fewer rows, and what to do."""
    return (
        f"{counted(count, 'row')} are too many for one file, which holds {MAX_ROWS}: "
        "choose machines with --signature"
    )


def _row_lines(groups: Iterable[Iterable[Row]]) -> Iterator[str]:
    for group in groups:
        lines = {row_line(row): _place_of(row) for row in group}
        yield from sorted(lines, key=lambda line: (lines[line], line))


def _place_of(row: Row) -> tuple[Any, ...]:
    """The sort key of a row in a file: kind, key, machine, build, then time."""
    machine, build = row.origin.machine, "" if isinstance(row, Unbuilt) else row.kernel_abi
    key: tuple[Any, ...]
    match row:
        case PlanRecord():
            key = (row.model_key, row.phase)
        case PredictorScore():
            key = (row.model_name, row.answers_key)
        case StepTime():
            key = (row.model_key, row.configuration_key, astuple(row.step))
        case _:
            key = (_numbers_of(row.problem),)
    return (
        *(_WORDS[type(row)], *key, machine.core_sig, machine.placement_sig, build),
        row.origin.created_at_ms,
    )


@lru_cache(maxsize=1024)
def _numbers_of(problem: Problem | UserProblem) -> tuple[Any, ...]:
    return astuple(problem)


def row_line(row: Row) -> str:
    """The line of a row, without its end."""
    word = _WORDS[type(row)]
    content = f'{{"{word}":{row_text(row)}}}'
    digest = f'"sha256":"{_digest_of(content)}"'
    return f"{content[:-1]},{digest}}}" if word < "sha256" else f"{{{digest},{content[1:]}"


def _row_digest(row: Mapping[str, Any]) -> str:
    return _digest_of(canonical(row))


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:ROW_DIGITS]


# ---- a row as text: put together without an encoder, whose start takes longer than a row does --------------


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


# ---- into a database, and from a file ---------------------------------------------------------------------


def import_rows(store: Store, rows: Iterable[Row]) -> Taken:
    """Append the rows, unverified, unless they are there.

    Interrupted, it has kept what it read; run again, it adds the rest.
    """
    source = iter(rows)
    read = added = 0
    while batch := [_unverified(row) for row in islice(source, ROWS_AT_ONCE)]:
        read += len(batch)
        added += store.add_missing(batch)
    return Taken(read, added)


def _unverified(row: Row) -> Row:
    return row if not row.origin.verified else replace(row, origin=replace(row.origin, verified=False))


def read_export(stream: BinaryIO, name: str, refuse: Refuse) -> Iterator[Row]:
    """The rows of a file, unverified; `refuse` hears of each line left out, while the rows are taken.

    Raises ExportFileError at once when the first line is not an export's, or one of a newer program.
    """
    lines = _Lines(stream, refuse)
    _check_header(lines.next() or b"", name)
    return _read_rows(lines, refuse)


def _read_rows(lines: _Lines, refuse: Refuse) -> Iterator[Row]:
    rows = 0
    while (line := lines.next()) is not None:
        if rows == MAX_ROWS:
            refuse(lines.number, f"the file has more than {MAX_ROWS} rows: the rest is not read")
            return
        try:
            timing = _timing_as_written(line)
            if timing is not None:
                rows += 1
                yield timing
                continue
            content = _parsed(line)
            if "rows" in content:
                _check_end(content, rows, lines, refuse)
                return
            rows += 1
            yield _row(content, line)
        except (ValueError, RecursionError) as error:
            refuse(lines.number, textwrap.shorten(str(error), MAX_REASON_CHARS, placeholder=" ..."))
    refuse(lines.number + 1, "the file ends without its closing line: it was cut short")


class _Lines:
    """The lines of a stream in bounded memory, their number, and the digest of those before the last one."""

    def __init__(self, stream: BinaryIO, refuse: Refuse) -> None:
        self.number = 0
        self._stream = stream
        self._refuse = refuse
        self._digest = hashlib.sha256()
        self._last = b""

    def next(self) -> bytes | None:
        """The next line that is not too long, None at the end."""
        while True:
            self._digest.update(self._last)
            self._last = self._stream.readline(MAX_LINE_BYTES)
            if not self._last:
                return None
            self.number += 1
            if self._last.endswith(b"\n") or len(self._last) < MAX_LINE_BYTES:
                return self._last
            self._skip_the_rest()
            self._refuse(self.number, f"the line is longer than {MAX_LINE_BYTES} bytes")

    def _skip_the_rest(self) -> None:
        skipped_bytes = 0
        while not self._last.endswith(b"\n"):
            skipped_bytes += len(self._last)
            if skipped_bytes > MAX_SKIPPED_BYTES:  # a device, say, gives zeros without end
                raise ExportFileError(
                    f"line {self.number} has more than {MAX_SKIPPED_BYTES >> 20} MiB:"
                    " this is not what `phasewise db export` wrote"
                )
            self._digest.update(self._last)
            self._last = self._stream.readline(MAX_LINE_BYTES)
            if not self._last:
                return

    def digest_before(self) -> str:
        """SHA-256, in hex, of all bytes before the line that was returned last."""
        return self._digest.hexdigest()


def _check_header(line: bytes, name: str) -> None:
    try:
        header = _parsed(line)
    except (ValueError, RecursionError):
        header = {}
    version = header.get("version")
    if header.get("file") != FILE or type(version) is not int or version < 1:
        raise ExportFileError(f"{name} is not a file that `phasewise db export` wrote")
    if version > VERSION:
        raise ExportFileError(
            f"{name} has version {version!r:.20}, newer than this phasewise reads ({VERSION}): "
            "upgrade phasewise"
        )


def _check_end(content: Mapping[str, Any], rows: int, lines: _Lines, refuse: Refuse) -> None:
    if content != {"rows": rows, "sha256": lines.digest_before()}:
        refuse(lines.number, "the closing line does not fit: lines were lost, added or changed on the way")
    if lines.next() is not None:
        refuse(lines.number, "there is more after the closing line: it is not read")


def _parsed(line: bytes) -> dict[str, Any]:
    """A line's JSON object. Raises ValueError, or RecursionError where it nests too deeply."""
    try:
        content = _DECODER.decode(line.decode("utf-8"))
    except RecordError:
        raise
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RecordError("the line is not a JSON object")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        raise RecordError("a name stands twice in one object")
    return by_name


def _no_constant(name: str) -> None:
    raise RecordError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_no_constant)


def read_row(line: bytes) -> Row:
    """The row of a line, unverified. ValueError or RecursionError where it holds none."""
    return _timing_as_written(line) or _row(_parsed(line), line)


def _row(content: dict[str, Any], line: bytes) -> Row:
    digest = content.pop("sha256", None)
    if digest is None or (digest != _digest_as_written(line) and digest != _row_digest(content)):
        raise RecordError("the row does not fit its checksum")
    word = next(iter(content), "")
    if len(content) != 1 or word not in KINDS:
        raise RecordError("the line holds no row of a kind that this phasewise knows")
    record: Any = KINDS[word]
    names = _names(record) | (set() if issubclass(record, Unbuilt) else {"kernel_abi"})
    return cast(Row, _reader(record)(_object(f"a {word.replace('_', ' ')}", content[word], names)))


_DIGEST_LAST = re.compile(rb'(.*),"sha256":"[0-9a-f]{16}"}\n', re.DOTALL)
_DIGEST_FIRST = re.compile(rb'{"sha256":"[0-9a-f]{16}",(.*)}\n', re.DOTALL)


def _digest_as_written(line: bytes) -> str | None:
    """The digest of a line that is written as ours are, by its bytes: nothing is written again."""
    last, first = _DIGEST_LAST.fullmatch(line), _DIGEST_FIRST.fullmatch(line)
    if last is None and first is None:
        return None
    body = last[1] + b"}" if last else b"{" + first[1] + b"}" if first else b""
    return hashlib.sha256(body).hexdigest()[:ROW_DIGITS]


_WHOLE, _TEXT, _OBJECT = rb"(0|[1-9][0-9]{0,18})", rb'"([ !#-\[\]-~]*)"', rb"(\{[^{}]*\})"
_TIMING_FIELDS = {
    **{"conditions": _OBJECT, "created_at_ms": _WHOLE, "effort_ns": _WHOLE, "estimate_ns": _WHOLE},
    **{"kernel_abi": _TEXT, "machine": _OBJECT, "numeric_error": rb"([-+.0-9e]+|null)", "problem": _OBJECT},
    **{"program_version": _TEXT, "samples_ns": rb"\[([1-9][0-9,]*)\]", "schedule": _OBJECT},
}
"""As files have them, in this order."""
_TIMING = re.compile(
    rb'(\{"measurement":\{'
    + b",".join(b'"%s":%s' % (name.encode(), form) for name, form in _TIMING_FIELDS.items())
    + rb'\}),"sha256":"([0-9a-f]{16})"\}\n'
)


def _timing_as_written(line: bytes) -> Measurement | None:
    """The timing of a line that is written as ours are; None: what the line holds is for `_row` to say.

    Nearly all rows of a file are such. What many of them share is parsed and checked once for each text, and
    no name can stand twice, as the pattern has each once.
    """
    match = _TIMING.fullmatch(line)
    if match is None:
        return None
    body, conditions, *numbers, abi, machine, error, problem, version, samples, schedule, digest = (
        match.groups()
    )
    if hashlib.sha256(body + b"}").hexdigest()[:ROW_DIGITS] != digest.decode() or b",0" in samples:
        return None
    try:
        at_ms, effort_ns, estimate_ns = map(int, numbers)
        sample = Sample(
            _shared_of(Sample, "schedule", schedule),
            tuple(map(int, samples.split(b","))),
            estimate_ns,
            _parsed_number(error),
            effort_ns,
            _parsed(conditions),
        )
        origin = Origin(_shared_of(Origin, "machine", machine), version.decode(), at_ms, verified=False)
        return Measurement(_shared_of(Measurement, "problem", problem), sample, abi.decode(), origin)
    except (ValueError, RecursionError):  # of which a RecordError is one
        return None


@lru_cache(maxsize=4096)
def _shared_of(record: Any, name: str, text: bytes) -> Any:
    """A field of a record that is a record itself."""
    part = next(part for part in parts(record) if part.name == name)
    return _value_reader(part)({name: _parsed(text)})


@lru_cache(maxsize=1024)
def _parsed_number(text: bytes) -> Any:
    return _DECODER.decode(text.decode())


@cache
def _names(record: Any) -> frozenset[str]:
    """The fields that a file has of a record."""
    names: set[str] = set()
    for part in parts(record):
        names |= _names(part.record) if part.record in BESIDE else {part.name}
    return frozenset(names - {"verified", "kernel_abi"})


@cache
def _reader(record: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The function that makes a record of the fields that a file has of it; unverified."""
    readers = [_value_reader(part) for part in parts(record)]
    return lambda fields: record(*[read(fields) for read in readers])


def _value_reader(part: RecordField) -> Callable[[Mapping[str, Any]], Any]:
    name, record = part.name, part.record
    if name == "verified":
        return lambda _: False
    if record is None:
        return lambda fields: as_tuples(value) if type(value := fields.get(name)) is list else value
    if record in BESIDE:
        return _reader(record)
    called = "a schedule" if record is Schedule else f"a {name}"
    names, fields_of = _names(record), tuple(field.name for field in parts(record))
    has_build = "kernel_abi" in fields_of

    def read(fields: Mapping[str, Any]) -> Any:
        value = fields.get(name)
        if value is None and name == "incumbent":
            return None
        inner = _object(called, value, names)
        if has_build:
            inner = {"kernel_abi": fields.get("kernel_abi"), **inner}
        try:
            return shared(record, *map(inner.get, fields_of))
        except TypeError:  # a value that no cache can look up: a list, or what the record refuses
            values = [as_tuples(inner.get(field)) for field in fields_of]
        try:
            return shared(record, *values)
        except TypeError:
            return record(*values)

    return read


def _object(what: str, value: object, names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{what} must be a JSON object, not {value!r:.80}")
    if value.keys() != names:
        unlike = sorted(set(names) ^ set(value))
        problem = "has no" if unlike[0] in names else "may not have"
        raise RecordError(f"{what} {problem} {unlike[0]!r:.80}")
    return value
