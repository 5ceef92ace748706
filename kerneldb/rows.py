"""Between records and rows of the tables. A row that no record can hold raises RecordError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import JSON, Column, Connection, Insert, Row, Table, bindparam, exists, insert, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from phasewise.kerneldb import queries
from phasewise.kerneldb.codec import (
    Getter,
    RecordField,
    as_tuples,
    assembler,
    flat_names,
    flat_parts,
    flattened,
    shared,
)
from phasewise.kerneldb.connect import json_of
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.models import (
    Base,
    MeasurementRow,
    PredictorScoreRow,
    ProblemRow,
    PromotionRow,
    ScheduleRow,
    ServicePlanRow,
    StepTimeRow,
    StorageDuelRow,
    UserKernelPromotionRow,
    UserKernelTimingRow,
)
from phasewise.kerneldb.records import (
    Measurement,
    PlanRecord,
    PredictorScore,
    Problem,
    Promotion,
    Schedule,
    StepTime,
    StorageDuel,
)
from phasewise.kerneldb.summaries import batched
from phasewise.kerneldb.user_kernels import UserPromotion, UserTiming

if TYPE_CHECKING:
    from phasewise.kerneldb.queries import AnySelect

    AnyRow: TypeAlias = Row[*tuple[Any, ...]]

T = TypeVar("T")
Unbuilt: TypeAlias = PlanRecord | PredictorScore
"""Rows that are of no build of the kernels."""
Shared: TypeAlias = Measurement | Promotion | StorageDuel | StepTime | UserTiming | UserPromotion | Unbuilt
"""The kinds of rows that databases may give to each other."""

MOST_SHARED = 65_536
"""Most problems, or schedules, that `SharedRecords` keeps in memory: some 20 MB."""

KEYS_AT_ONCE = 100
"""Keys that one query asks for: a database has limits on its parameters."""


@dataclass(frozen=True)
class Kept:
    """The table of one type of records."""

    model: Any
    """The table, a class of `models`."""
    keyed: tuple[str, ...] = ()
    """Fields that are rows of their own; a column of ids stands for each."""


KEPT: dict[type, Kept] = {
    Measurement: Kept(MeasurementRow, ("problem", "schedule")),
    Promotion: Kept(PromotionRow, ("problem", "schedule", "incumbent")),
    StorageDuel: Kept(StorageDuelRow, ("problem", "schedule", "dense_schedule")),
    PlanRecord: Kept(ServicePlanRow),
    StepTime: Kept(StepTimeRow),
    PredictorScore: Kept(PredictorScoreRow),
    UserTiming: Kept(UserKernelTimingRow),
    UserPromotion: Kept(UserKernelPromotionRow),
}


def rows_of(record: type) -> AnySelect:
    """All rows of a type of records: the id, then columns as `record_of` expects them."""
    kept = KEPT[record]
    columns = [kept.model.id]
    for name in flat_names(record):
        columns += _columns(kept, name)
    return queries.joined(select(*columns), kept.model, kept.keyed)


@cache
def narrow_rows_of(record: type) -> AnySelect:
    """As `rows_of`, with ids in place of problems and schedules, for `SharedRecords.record_of`."""
    kept = KEPT[record]
    columns = [kept.model.id]
    for name in flat_names(record):
        columns += [getattr(kept.model, f"{name}_id")] if name in kept.keyed else _columns(kept, name)
    return select(*columns)


class SharedRecords:
    """Problems and schedules by their ids, read once: many rows name the same."""

    def __init__(self) -> None:
        self._by_id: dict[Any, dict[int, Any]] = {Problem: {}, Schedule: {}}
        self._assemblers: dict[Any, Callable[[AnyRow], Any]] = {}

    def learn(self, session: Session, record: type, rows: Iterable[AnyRow]) -> None:
        """Read what these rows name and is not known yet."""
        keyed = [(place, _kind_of(name)) for place, name in _keyed_places(KEPT[record], record)]
        for kind in {kind for _, kind in keyed}:
            records = self._by_id[kind]
            places = [place for place, own in keyed if own is kind]
            new = {row[place] for row in rows for place in places} - records.keys() - {None}
            if len(records) + len(new) > MOST_SHARED:
                records.clear()
                new = {row[place] for row in rows for place in places} - {None}
            model = ProblemRow if kind is Problem else ScheduleRow
            for some in batched(sorted(new), KEYS_AT_ONCE):
                for number, *values in session.connection().execute(_by_ids(model), {"ids": some}):
                    records[number] = made(kind, *values)

    def record_of(self, record: type[T], row: AnyRow) -> T:
        """The record of a row of `narrow_rows_of`, of those that were learnt. RecordError as `record_of`."""
        kind: Any = record
        if kind not in self._assemblers:
            self._assemblers[kind] = self._assembler(kind)
        return cast(T, self._assemblers[kind](row))

    def _assembler(self, record: Any) -> Callable[[AnyRow], Any]:
        kept, place, getters = KEPT[record], 1, dict[str, Getter]()
        for part in flat_parts(record):
            if part.name in kept.keyed:
                getters[part.name] = self._by_place(_kind_of(part.name), place)
                place += 1
            else:
                n_columns = len(_columns(kept, part.name))
                getters[part.name] = _getter(kept, part, place, place + n_columns)
                place += n_columns
        return assembler(record, getters.__getitem__)

    def _by_place(self, kind: type, place: int) -> Getter:
        by_id = self._by_id[kind]

        def read(row: AnyRow) -> object:
            number = row[place]
            record = None if number is None else by_id.get(number)
            if isinstance(record, RecordError):
                raise record
            return record

        return read


def made(record: Any, *values: Any) -> Any:
    """The record of these values, or why there is none."""
    try:
        return shared(record, *values)
    except RecordError as error:
        return error


def _kind_of(name: str) -> type:
    return Problem if name == "problem" else Schedule


def _keyed_places(kept: Kept, record: type) -> list[tuple[int, str]]:
    """The places, among a narrow row's columns, of the ids of problems and schedules."""
    place, places = 1, []
    for name in flat_names(record):
        if name in kept.keyed:
            places.append((place, name))
        place += 1 if name in kept.keyed else len(_columns(kept, name))
    return places


@cache
def _by_ids(model: type[ProblemRow | ScheduleRow]) -> AnySelect:
    return select(model.id, *_key_columns(model)).where(model.id.in_(bindparam("ids", expanding=True)))


def _columns(kept: Kept, name: str) -> list[Any]:
    if name in kept.keyed:
        own = queries.KEYED[name]
        return [own.id, *(getattr(own, field) for field in _FIELDS_OF_KEYED[own is queries.KEYED["problem"]])]
    value = getattr(kept.model, name)
    return [] if isinstance(value, str) else [value]


_FIELDS_OF_KEYED = {
    is_problem: flat_names(Problem if is_problem else Schedule) for is_problem in (True, False)
}


def record_of(record: type[T], row: AnyRow) -> T:
    """The record of a row of `rows_of`. RecordError where it can hold none."""
    kind: Any = record
    return cast(T, _assembler(kind)(row))


@cache
def _assembler(record: Any) -> Callable[[AnyRow], Any]:
    kept, place, getters = KEPT[record], 1, dict[str, Getter]()
    for part in flat_parts(record):
        n_columns = len(_columns(kept, part.name))
        getters[part.name] = _getter(kept, part, place, place + n_columns)
        place += n_columns
    return assembler(record, getters.__getitem__)


def _getter(kept: Kept, part: RecordField, first: int, end: int) -> Getter:
    """The function that reads the columns of a field, from `first` to before `end`."""
    name = part.name
    if name in kept.keyed:
        keyed = _kind_of(name)
        return lambda row: None if row[first] is None else shared(keyed, *row[first + 1 : end])
    if first == end:  # the same for all rows of the table
        constant = getattr(kept.model, name)
        return lambda row: constant
    return (lambda row: as_tuples(row[first])) if part.is_list else itemgetter(first)


def row_of(session: Session, record: object) -> Base:
    """A new row; its problem and its schedules are inserted if they are new."""
    kept, columns = KEPT[type(record)], flattened(record)
    for name in kept.keyed:
        keyed = columns.pop(name)
        columns[f"{name}_id"] = None if keyed is None else _id_of(session, keyed)
    return cast(Base, kept.model(**columns))


def add_measurements(session: Session, measurements: Sequence[Measurement]) -> None:
    """Insert them, and their problems and schedules where these are new.

    In few statements: other processes wait for the transaction, and most of it would be SQLAlchemy.
    """
    if not measurements:
        return
    problems = _ids_of(session, ProblemRow, [measurement.problem for measurement in measurements])
    schedules = _ids_of(session, ScheduleRow, [measurement.sample.schedule for measurement in measurements])
    rows = []
    for measurement in measurements:
        columns = flattened(measurement)
        columns["problem_id"] = problems[id(columns.pop("problem"))]
        columns["schedule_id"] = schedules[id(columns.pop("schedule"))]
        rows.append(columns)
    _insert(session.connection(), _table(MeasurementRow), rows)


def _insert(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows that have the same columns, by the driver: SQLAlchemy would look at each value of each."""
    names, dialect = [*rows[0]], connection.dialect
    columns: list[list[Any]] = [[row[name] for row in rows] for name in names]
    for place, name in enumerate(names):
        if isinstance(table.c[name].type, JSON):
            columns[place] = [*map(json_of, columns[place])]
    into = f"INSERT INTO {table.name} ({', '.join(names)})"
    if dialect.name == "sqlite":
        marks = ", ".join("?" * len(names))
        connection.exec_driver_sql(f"{into} VALUES ({marks})", [*zip(*columns, strict=True)])
    elif dialect.driver == "psycopg":  # one statement, and so one answer to wait for
        arrays = ", ".join(f"%s::{table.c[name].type.compile(dialect)}[]" for name in names)
        connection.exec_driver_sql(f"{into} SELECT * FROM unnest({arrays})", tuple(columns))
    else:
        connection.execute(insert(table), [*rows])


def _ids_of(
    session: Session, model: type[ProblemRow | ScheduleRow], records: Iterable[Problem | Schedule]
) -> dict[int, int]:
    """The ids of their rows, inserted where they are new; by the `id` of each record.

    Many of the records are the same object, which is looked at once.
    """
    by_identity = {id(record): record for record in records}
    keys = {record: tuple(flattened(record).values()) for record in by_identity.values()}
    ids = _found_ids(session, model, [*keys.values()])
    new = [record for record, key in keys.items() if key not in ids]
    if new:
        _insert_new(session, model, new)
        ids |= _found_ids(session, model, [keys[record] for record in new])
    return {identity: ids[keys[record]] for identity, record in by_identity.items()}


def _found_ids(
    session: Session, model: type[ProblemRow | ScheduleRow], keys: Sequence[tuple[Any, ...]]
) -> dict[tuple[Any, ...], int]:
    """The ids of those that have a row, by their values."""
    ids: dict[tuple[Any, ...], int] = {}
    for some in batched(keys, KEYS_AT_ONCE):
        for number, *key in session.connection().execute(_ids_by_key(model), {"keys": some}):
            ids[tuple(key)] = number
    return ids


def _insert_new(
    session: Session, model: type[ProblemRow | ScheduleRow], records: Sequence[Problem | Schedule]
) -> None:
    """Insert those that have no row."""
    new = [flattened(record) for record in records]
    try:
        with session.begin_nested():
            session.connection().execute(_insertion_where_absent(model), new)
    except IntegrityError:  # another process was quicker with one of them
        for key in new:
            _find_or_insert(session, model, key)


@cache
def _insertion_where_absent(model: type[ProblemRow | ScheduleRow]) -> Insert:
    key = _key_columns(model)
    parameters = {column.name: bindparam(column.name, type_=column.type) for column in key}
    is_there = exists().where(*(column == parameters[column.name] for column in key))
    return insert(_table(model)).from_select([*parameters], select(*parameters.values()).where(~is_there))


@cache
def _ids_by_key(model: type[ProblemRow | ScheduleRow]) -> AnySelect:
    """Built once: building takes several times as long as the answer."""
    columns = _key_columns(model)
    return select(model.id, *columns).where(tuple_(*columns).in_(bindparam("keys", expanding=True)))


def _key_columns(model: type[ProblemRow | ScheduleRow]) -> list[Column[Any]]:
    """All but the id."""
    return [column for column in _table(model).columns if not column.primary_key]


def _table(model: type[Base]) -> Table:
    """For statements that are not the unit of work's."""
    return cast(Table, model.__table__)


def _id_of(session: Session, record: Problem | Schedule) -> int:
    """The id of the record's row, inserted if new. A session is one transaction, and asks once for each."""
    ids: dict[Problem | Schedule, int] = session.info.setdefault("ids", {})
    if record not in ids:
        model = ProblemRow if isinstance(record, Problem) else ScheduleRow
        ids[record] = _find_or_insert(session, model, flattened(record))
    return ids[record]


def _find_or_insert(session: Session, model: type[ProblemRow | ScheduleRow], key: dict[str, Any]) -> int:
    """Another process may insert it between the look and the insertion."""
    query = select(model.id).filter_by(**key)
    row_id = session.scalar(query)
    if row_id is not None:
        return row_id
    row = model(**key)
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError:
        return session.scalars(query).one()
    return row.id


# ---- rows that are not there yet -------------------------------------------------------------------------

Build: TypeAlias = Callable[[Any, Iterable["AnyRow"]], Iterable[Shared]]
"""Makes records of rows of `rows_of`."""


def missing_rows(session: Session, rows: Iterable[Shared], build: Build) -> Iterator[Shared]:
    """Rows of a key at a time are compared with what the key has of the same instants."""
    stored_contents: set[Shared] = set()
    for _, same_key in groupby(rows, _key_of):
        group = [*same_key]
        instants = {row.origin.created_at_ms for row in group}
        stored = session.execute(_same_key_as(group[0], min(instants), max(instants)))
        stored_contents |= {
            _content_of(row) for row in build(type(group[0]), stored) if row.origin.created_at_ms in instants
        }
        for row in group:
            n_stored = len(stored_contents)
            stored_contents.add(_content_of(row))
            if len(stored_contents) > n_stored:
                yield row


def _key_of(row: Shared) -> tuple[object, ...]:
    if isinstance(row, PlanRecord):
        return (PlanRecord.__name__, row.model_key, row.phase, row.origin.machine)
    if isinstance(row, PredictorScore):
        return (PredictorScore.__name__, row.model_name, row.answers_key)
    of_key = (row.model_key, row.configuration_key, row.step) if isinstance(row, StepTime) else (row.problem,)
    return (type(row).__name__, *of_key, row.origin.machine, row.kernel_abi)


def _same_key_as(row: Shared, first_ms: int, last_ms: int) -> AnySelect:
    """The stored rows of a row's key from the first to the last of these instants."""
    kept, machine = KEPT[type(row)], row.origin.machine
    query = rows_of(type(row)).where(kept.model.created_at_ms.between(first_ms, last_ms))
    match row:
        case StepTime():
            return query.where(
                StepTimeRow.configuration_key == row.configuration_key,
                StepTimeRow.model_key == row.model_key,
                queries.of_machine(StepTimeRow, machine),
            )
        case PlanRecord():
            return query.where(
                ServicePlanRow.model_key == row.model_key,
                ServicePlanRow.phase == row.phase,
                queries.of_machine(ServicePlanRow, machine),
            )
        case PredictorScore():
            return query.where(
                PredictorScoreRow.model_name == row.model_name,
                PredictorScoreRow.answers_key == row.answers_key,
            )
        case UserTiming() | UserPromotion():
            model = kept.model
            return query.where(model.core_sig == machine.core_sig, model.kernel_abi == row.kernel_abi)
        case _:
            return query.where(*queries.of_problem(kept.model, row.problem, machine, row.kernel_abi))


def _content_of(row: Shared) -> Shared:
    """The columns that make two rows the same: everything but whether it is trusted here."""
    return replace(row, origin=replace(row.origin, verified=False)) if row.origin.verified else row
