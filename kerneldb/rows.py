"""Conversion between records and rows of the tables. A row that fits no record raises RecordError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import JSON, Connection, bindparam, insert, select, tuple_
from sqlalchemy.exc import IntegrityError

from phasewise.kerneldb import queries
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.fields import flat_parts, flattened, is_shared, made, parts, shared
from phasewise.kerneldb.queries import batched
from phasewise.kerneldb.records import SINGLE_CORE, Problem, Schedule, StoredRow, trusted
from phasewise.kerneldb.tables import TABLES

if TYPE_CHECKING:
    from sqlalchemy import Row as TableRow

    from phasewise.kerneldb.queries import AnySelect

    AnyRow: TypeAlias = TableRow[*tuple[Any, ...]]

Getter: TypeAlias = Callable[[Any], Any]
"""Function that reads one value of a row."""

MOST_SHARED = 65_536
"""Most problems, or schedules, that `SharedRecords` keeps in memory: some 20 MB."""

KEYS_AT_ONCE = 100
"""Keys that one query asks for at most: a database limits its parameters."""


@cache
def rows_of(record: Any) -> AnySelect:
    """Select all rows of a kind: the id, then its columns, with ids in place of problems and schedules."""
    columns = TABLES[record].columns
    return select(columns["id"], *(columns[name] for name in _places(record)))


@cache
def _places(record: Any) -> Mapping[str, int]:
    """The position of each column in a row of `rows_of`."""
    names = [f"{part.name}_id" if part.record else part.name for part in flat_parts(record)]
    return {name: place for place, name in enumerate(filter(TABLES[record].c.__contains__, names), start=1)}


class SharedRecords:
    """Makes records of rows; problems and schedules, which many rows name, are read once."""

    def __init__(self, connection: Connection, record: Any) -> None:
        self._connection = connection
        self._by_id: dict[Any, dict[int, Any]] = {Problem: {}, Schedule: {}}
        self._make = _assembler(record, self._getter_of(record))
        self._keyed = [
            (_places(record)[f"{part.name}_id"], part.record) for part in flat_parts(record) if part.record
        ]

    def learn(self, rows: Iterable[AnyRow]) -> None:
        """Read the problems and schedules that these rows name, unless they are known."""
        for kind in {kind for _, kind in self._keyed}:
            records_by_id = self._by_id[kind]
            named = {row[place] for row in rows for place, own in self._keyed if own is kind} - {None}
            new = named - records_by_id.keys()
            if len(records_by_id) + len(new) > MOST_SHARED:
                records_by_id.clear()
                new = named
            for some in batched(sorted(new), KEYS_AT_ONCE):
                for number, *values in self._connection.execute(_by_ids(kind), {"ids": some}):
                    records_by_id[number] = made(kind, *values)

    def record_of(self, row: AnyRow) -> Any:
        """Make the record of a row that `learn` was given. RecordError for a row out of bounds."""
        return self._make(row)

    def _getter_of(self, record: Any) -> Callable[[Any], Getter]:
        def getter_of(part: Any) -> Getter:
            if part.record:
                return self._by_place(part.record, _places(record)[f"{part.name}_id"])
            place = _places(record).get(part.name)
            if place is None:
                return lambda _: SINGLE_CORE
            if isinstance(TABLES[record].c[part.name].type, JSON):
                return lambda row: as_tuples(row[place])
            return itemgetter(place)

        return getter_of

    def _by_place(self, kind: Any, place: int) -> Getter:
        by_id = self._by_id[kind]

        def read(row: AnyRow) -> object:
            number = row[place]
            record = None if number is None else by_id.get(number)
            if isinstance(record, RecordError):
                raise record
            return record

        return read


def _assembler(record: Any, getter_of: Callable[[Any], Getter]) -> Callable[[Any], Any]:
    """Make a function from a row to its record. getter_of: gives the reader of a flat field of a row."""
    getters = [
        getter_of(part) if part.is_flat else _assembler(part.record, getter_of) for part in parts(record)
    ]
    if is_shared(record):
        return lambda row: shared(record, *[get(row) for get in getters])
    return lambda row: record(*[get(row) for get in getters])


def as_tuples(value: Any) -> Any:
    """Turn JSON's lists, and lists of lists, into the tuples of records; other values stay as they are."""
    if type(value) is not list:
        return value
    if list in map(type, value):
        return tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)
    return tuple(value)


@cache
def _by_ids(kind: Any) -> AnySelect:
    number, *columns = TABLES[kind].c
    return select(number, *columns).where(number.in_(bindparam("ids", expanding=True)))


# ---- new rows ---------------------------------------------------------------------------------------------


def add_rows(connection: Connection, rows: Iterable[StoredRow]) -> None:
    """Insert the rows in few statements, since other processes wait, with problems and schedules that are
    new: these by their tables and values, for in two orders two processes would wait for each other."""
    by_kind: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(type(row), []).append(flattened(row))
    records: dict[Any, set[Any]] = {}
    for kind, columns in by_kind.items():
        for part in flat_parts(kind):
            if part.record:
                records.setdefault(part.record, set()).update(values[part.name] for values in columns)
    ids = {kind: _ids_of(connection, kind, records[kind]) for kind in sorted(records, key=str)}
    for kind, columns in by_kind.items():
        for part in flat_parts(kind):
            for values in columns:
                if part.record:
                    values[f"{part.name}_id"] = ids[part.record][values.pop(part.name)]
                elif part.name not in TABLES[kind].c:
                    del values[part.name]
        connection.execute(insert(TABLES[kind]), columns)


def _ids_of(connection: Connection, kind: type, records: Iterable[Any]) -> dict[Any, int | None]:
    """The ids of problems or schedules, inserted where they are new; None of None."""
    keys = {record: tuple(flattened(record).values()) for record in records if record is not None}
    ids = _found_ids(connection, kind, [*keys.values()])
    new = sorted((record for record, key in keys.items() if key not in ids), key=repr)
    if new:
        _insert_new(connection, kind, new)
        ids |= _found_ids(connection, kind, [keys[record] for record in new])
    return {None: None} | {record: ids[key] for record, key in keys.items()}


def _found_ids(
    connection: Connection, kind: type, keys: Sequence[tuple[Any, ...]]
) -> dict[tuple[Any, ...], int]:
    """The ids of the problems or schedules that have a row, by their values."""
    ids: dict[tuple[Any, ...], int] = {}
    for some in batched(keys, KEYS_AT_ONCE):
        for number, *key in connection.execute(_ids_by_key(kind), {"keys": some}):
            ids[tuple(key)] = number
    return ids


def _insert_new(connection: Connection, kind: type, records: Sequence[Any]) -> None:
    """Insert problems or schedules without a row; one by one if another process inserted some meanwhile."""
    statement, new = insert(TABLES[kind]), [flattened(record) for record in records]
    try:
        with connection.begin_nested():
            connection.execute(statement, new)
    except IntegrityError:
        for key in new:
            try:
                with connection.begin_nested():
                    connection.execute(statement, key)
            except IntegrityError:
                continue


@cache
def _ids_by_key(kind: type) -> AnySelect:
    """The query for ids by values, built once: building takes several times as long as the answer."""
    number, *key = TABLES[kind].c
    return select(number, *key).where(tuple_(*key).in_(bindparam("keys", expanding=True)))


# ---- rows that are not there yet -------------------------------------------------------------------------


def missing_rows(
    rows: Iterable[StoredRow], stored_rows: Callable[[type[StoredRow], AnySelect], Iterable[StoredRow]]
) -> Iterator[StoredRow]:
    """Yield the rows that the database lacks, verified or not. Rows of one key at a time are compared with
    the stored rows of that key and the same instants."""
    contents: set[StoredRow] = set()
    for _, same_key in groupby(rows, _key_of):
        group = [*same_key]
        kind: Any = type(group[0])
        instants = {row.origin.created_at_ms for row in group}
        of_instants = TABLES[kind].c.created_at_ms.between(min(instants), max(instants))
        query = rows_of(kind).where(*queries.of_same_key(group[0]), of_instants)
        contents |= {
            trusted(row, False) for row in stored_rows(kind, query) if row.origin.created_at_ms in instants
        }
        for row in group:
            n_contents = len(contents)
            contents.add(trusted(row, False))
            if len(contents) > n_contents:
                yield row


def _key_of(row: StoredRow) -> tuple[object, ...]:
    named = (getattr(row, name) for name in row.kind.named_by)
    return (row.kind.word, *named, row.origin.machine, row.build)
