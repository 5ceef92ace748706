"""Schedules as a file that can be published: JSON lines, deterministic, versioned, checksummed.

    {"file": "phasewise schedules", "version": 1}
    {"measurement": {...}, "sha256": "16 digits"}       a line for each row, with a checksum of its own
    {"plan": {...}, "sha256": "16 digits"}              kinds that name models or functions where asked for
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
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from itertools import chain, islice
from typing import Any, BinaryIO, TypeAlias

from phasewise._json import refuse_constant, with_unique_keys
from phasewise._words import counted
from phasewise.kerneldb.errors import ExportFileError, RecordError
from phasewise.kerneldb.fields import RecordField, is_shared, parts, shared
from phasewise.kerneldb.records import (
    KINDS,
    PRIVATE,
    MachineKey,
    Measurement,
    Origin,
    PlanRecord,
    Promotion,
    Sample,
    Schedule,
    StoredRow,
    trusted,
)
from phasewise.kerneldb.rows import as_tuples
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.summaries import summary_of

Refuse: TypeAlias = Callable[[int, str], None]
"""Callback for a line that is not taken: its number, from 1, and the reason."""

FILE = "phasewise schedules"
VERSION = 1

MAX_ROWS = 10_000_000
MAX_LINE_BYTES = 4 * 2**20
"""Most bytes of a line: twice a row with as many and as long samples as a record may have."""
MAX_SKIPPED_BYTES = 256 * 2**20
"""Most bytes of an overlong line that are read past: a device, say, gives zeros without end."""

ROWS_AT_ONCE = 2000
"""Rows appended in one transaction: few, so that other writers need not wait long."""

ROW_DIGITS = 16
MAX_REASON_CHARS = 200

BESIDE = (Sample, Origin)
"""Records whose fields stand beside those of the row, not nested, in a file."""

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Taken:
    """The number of rows of a file or of another database that were added and that were read."""

    read: int
    added: int

    @property
    def known(self) -> int:
        """The number of rows that were there already."""
        return self.read - self.added


def groups_of(
    store: Store,
    wanted: Callable[[MachineKey], bool] = lambda _: True,
    also: Collection[type[StoredRow]] = PRIVATE,
    as_shared: Callable[[PlanRecord], PlanRecord | None] = lambda plan: plan,
) -> Iterator[list[StoredRow]]:
    """Yield groups of rows in the order of a file: every timing, promotion and storage duel of the wanted
    machines. also: kinds of private rows to yield too: plans, scores of predictors and step times, which name
    models, and rows of users' kernels, which name functions. as_shared: function from a plan to the plan as
    it goes out, None where it cannot."""
    for record in KINDS.values():
        if record in also or record not in PRIVATE:
            for group in store.grouped(record, wanted):
                out = [as_shared(row) if isinstance(row, PlanRecord) else row for row in group]
                yield [row for row in out if row is not None]


def in_use_groups(
    store: Store,
    wanted: Callable[[MachineKey], bool] = lambda _: True,
    also: Collection[type[StoredRow]] = PRIVATE,
    as_shared: Callable[[PlanRecord], PlanRecord | None] = lambda plan: plan,
) -> Iterator[list[StoredRow]]:
    """Like `groups_of`, but only the newest timing and promotion of each schedule in use, with five samples
    each. All of these rows are in memory at once; they are as many as there are problems."""
    timings = [
        replace(row, sample=replace(row.sample, samples_ns=tuple(summary_of(row.sample.samples_ns))))
        for row in store.promoted_measurements()
        if wanted(row.origin.machine)
    ]
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


def rows_of(
    store: Store,
    wanted: Callable[[MachineKey], bool] = lambda _: True,
    also: Collection[type[StoredRow]] = PRIVATE,
) -> Iterator[StoredRow]:
    """Yield the rows of `groups_of`, one after the other."""
    return chain.from_iterable(groups_of(store, wanted, also))


def export_lines(groups: Iterable[Iterable[StoredRow]]) -> Iterator[str]:
    """Yield the lines of a file with these rows, ASCII with line ends. Groups come in the order of a file
    (`groups_of`); one of them at a time is in memory."""
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
    """The message that a file would hold too many rows, with what to do."""
    rows = counted(count, "row")
    return f"{rows} are too many for one file, which holds {MAX_ROWS}: choose machines with --signature"


def _row_lines(groups: Iterable[Iterable[StoredRow]]) -> Iterator[str]:
    for group in groups:
        lines = {row_line(row): _place_of(row) for row in group}
        yield from sorted(lines, key=lambda line: (lines[line], line))


def _place_of(row: StoredRow) -> tuple[Any, ...]:
    """The sort key of a row in a file: kind, key, machine, build, then time."""
    values = (getattr(row, name) for name in row.kind.named_by)
    named = (value if isinstance(value, str) else _numbers_of(value) for value in values)
    machine, origin = row.origin.machine, row.origin
    return (
        *(row.kind.word, *named, machine.core_sig, machine.placement_sig, row.build),
        origin.created_at_ms,
    )


@lru_cache(maxsize=1024)
def _numbers_of(record: Any) -> tuple[Any, ...]:
    return astuple(record)


def row_line(row: StoredRow) -> str:
    """The line of a row in a file, without its line end."""
    word, content = row.kind.word, canonical({row.kind.word: fields_of(row)})
    digest = f'"sha256":"{_digest_of(content)}"'
    return f"{content[:-1]},{digest}}}" if word < "sha256" else f"{{{digest},{content[1:]}"


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:ROW_DIGITS]


def canonical(value: Mapping[str, Any]) -> str:
    """Write a JSON object as canonical text; ValueError for a number that JSON lacks."""
    return _ENCODER.encode(value)


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a record as a file has them; a kernel's build always stands beside the row's fields."""
    fields: dict[str, Any] = {}
    row: Any = type(record)
    for part in parts(row):
        value = getattr(record, part.name)
        if part.record in BESIDE:
            fields |= fields_of(value)
        elif part.record is None or value is None:
            fields[part.name] = value
        else:
            kind: Any = part.record
            inner = (_shared_fields if is_shared(kind) else fields_of)(value)
            fields[part.name] = {name: inner[name] for name in inner if name != "kernel_abi"}
            fields |= {name: inner[name] for name in inner if name == "kernel_abi"}
    fields.pop("verified", None)
    return fields


_shared_fields = lru_cache(maxsize=4096)(fields_of)


# ---- into a database, and from a file ---------------------------------------------------------------------


def import_rows(store: Store, rows: Iterable[StoredRow]) -> Taken:
    """Append the rows that are not there yet, unverified. An interrupted import has kept the rows it read;
    run again, it adds the rest."""
    source = iter(rows)
    read = added = 0
    while batch := [trusted(row, False) for row in islice(source, ROWS_AT_ONCE)]:
        read += len(batch)
        added += store.add_missing(batch)
    return Taken(read, added)


def read_export(stream: BinaryIO, name: str, refuse: Refuse) -> Iterator[StoredRow]:
    """Read the rows of a file, all unverified; `refuse` is called with each line that is left out. Raises
    ExportFileError at once when the first line is not an export's, or a newer program's."""
    lines = _Lines(stream, refuse)
    _check_header(lines.next() or b"", name)
    return _read_rows(lines, refuse)


def _read_rows(lines: _Lines, refuse: Refuse) -> Iterator[StoredRow]:
    rows = 0
    while (line := lines.next()) is not None:
        if rows == MAX_ROWS:
            refuse(lines.number, f"the file has more than {MAX_ROWS} rows: the rest is not read")
            return
        try:
            content = _parsed(line)
            if "rows" in content:
                _check_end(content, rows, lines, refuse)
                return
            rows += 1
            yield _row(content)
        except (ValueError, RecursionError) as error:
            refuse(lines.number, textwrap.shorten(str(error), MAX_REASON_CHARS, placeholder=" ..."))
    refuse(lines.number + 1, "the file ends without its closing line: it was cut short")


class _Lines:
    """Lines of a stream in bounded memory, with the last one's number and the digest of those before."""

    def __init__(self, stream: BinaryIO, refuse: Refuse) -> None:
        self.number = 0
        self._stream = stream
        self._refuse = refuse
        self._digest = hashlib.sha256()
        self._last = b""

    def next(self) -> bytes | None:
        """The next line that is not too long, None at the end of the stream."""
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
    """Parse a line into a JSON object. Raises ValueError, or RecursionError for one nested too deeply."""
    try:
        content = _DECODER.decode(line.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RecordError("the line is not a JSON object")
    return content


_DECODER = json.JSONDecoder(object_pairs_hook=with_unique_keys, parse_constant=refuse_constant)


def read_row(line: bytes) -> StoredRow:
    """Read the row of a line, unverified. ValueError or RecursionError for a line that holds none."""
    return _row(_parsed(line))


def _row(content: dict[str, Any]) -> StoredRow:
    digest = content.pop("sha256", None)
    if digest is None or digest != _digest_of(canonical(content)):
        raise RecordError("the row does not fit its checksum")
    word = next(iter(content), "")
    if len(content) != 1 or word not in KINDS:
        raise RecordError("the line holds no row of a kind that this phasewise knows")
    record: Any = KINDS[word]
    fields = _object(f"a {word.replace('_', ' ')}", content[word], _names(record))
    row: StoredRow = _made(record, fields, fields.get("kernel_abi"))
    return row


@cache
def _names(record: Any) -> frozenset[str]:
    """The names of a row's fields in a file, without the kernel's build, which stands beside them."""
    inner = [part.record for part in parts(record) if part.record not in (None, *BESIDE)]
    has_build = "kernel_abi" in (part.name for kind in (record, *inner) for part in parts(kind))
    return _own_names(record) | ({"kernel_abi"} if has_build else set())


@cache
def _own_names(record: Any) -> frozenset[str]:
    names: set[str] = set()
    for part in parts(record):
        names |= _own_names(part.record) if part.record in BESIDE else {part.name}
    return frozenset(names - {"verified", "kernel_abi"})


def _made(record: Any, fields: Mapping[str, Any], build: object) -> Any:
    """Make an unverified record from its fields in a file. build: the row's kernel build."""
    if is_shared(record):
        values = [fields[part.name] for part in parts(record)]
        try:
            return shared(record, *values)
        except TypeError:  # a list, say, which no cache can look up: for the record to refuse
            return record(*values)
    return record(*[_value(part, fields, build) for part in parts(record)])


def _value(part: RecordField, fields: Mapping[str, Any], build: object) -> Any:
    name, record = part.name, part.record
    if record is None:
        if name == "verified":
            return False
        return build if name == "kernel_abi" else as_tuples(fields[name])
    if record in BESIDE:
        return _made(record, fields, build)
    value = fields[name]
    if value is None and part.may_be_none:
        return None
    called = "a schedule" if record is Schedule else f"a {name}"
    return _made(record, _object(called, value, _own_names(record)), build)


def _object(what: str, value: object, names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{what} must be a JSON object, not {value!r:.80}")
    if value.keys() != names:
        unlike = sorted(set(names) ^ set(value))
        problem = "has no" if unlike[0] in names else "may not have"
        raise RecordError(f"{what} {problem} {unlike[0]!r:.80}")
    return value
