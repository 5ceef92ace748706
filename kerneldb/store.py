"""The store: opens a database, appends records, returns records. Its callers never see SQL.

Promises that every backend keeps (tests/kerneldb/test_store.py runs them on each):
- Rows are appended, never edited; a call that appends several appends all of them or none.
- Keys are content: the same problem or schedule is one row, whichever process writes it first.
- A row that breaks its record's bounds is skipped and reported, and does not hide the good ones.
- Several processes may read and write at once. A `Store` itself belongs to one thread at a time.
- A newer schema is refused, and nothing is touched.
- An older one is read too where it cannot be upgraded: what it has no table for has no rows.
- SQLite is copied beside itself before its schema is upgraded; a server's is upgraded when that is asked for.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, delete, func, select, text

from phasewise.kerneldb import connect, counts, queries, schema, summaries
from phasewise.kerneldb.counts import Key, KeyCount, Report, StoreStats
from phasewise.kerneldb.errors import (
    DatabaseFullError,
    DatabaseTooOldError,
    KernelDbError,
    ReadOnlyDatabaseError,
    RecordError,
)
from phasewise.kerneldb.fields import made
from phasewise.kerneldb.location import Location, locate
from phasewise.kerneldb.queries import batched
from phasewise.kerneldb.records import (
    KINDS,
    MachineKey,
    Measurement,
    PlanRecord,
    Problem,
    Promotion,
    R,
    Schedule,
    StepTime,
    StorageDuel,
    StoredRow,
)
from phasewise.kerneldb.rows import SharedRecords, add_rows, missing_rows, rows_of
from phasewise.kerneldb.schema import SchemaChange
from phasewise.kerneldb.summaries import Summarised
from phasewise.kerneldb.tables import MEASUREMENT, PROBLEM, TABLES

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from phasewise.kerneldb.queries import AnySelect, Condition

_IMPORT_LOCK = 0x70687769  # of PostgreSQL: a number that no other program is likely to use

ROWS_AT_ONCE = 500
"""Rows that a scan over a whole table keeps in memory."""

_log = logging.getLogger(__name__)


@contextmanager
def open_store(
    db: str | os.PathLike[str] | None = None, report: Report = _log.warning, *, upgrades_server: bool = False
) -> Iterator[Store]:
    """Open the database that `db` names (see `locate`), creating it, or upgrading a file, where needed.

    upgrades_server: upgrade a server's database of an older schema; without it such a database is only read.
    `report` gets one line for each thing worth a remark: an upgrade, a read-only database, a row skipped.
    Raises KernelDbError, in one clear line, when the database cannot be used.
    """
    location = locate(db)
    obstacle: KernelDbError | None = None
    if location.file is not None:
        if location.is_absent:
            connect.make_room(location)
        elif not connect.check_file(location.file):
            obstacle = ReadOnlyDatabaseError(f"database {location.name} is read-only")
        elif not connect.has_room(location.file):
            obstacle = DatabaseFullError(f"database {location.name} cannot grow: the disk is full")
    engine = connect.engine_for(location, read_only=obstacle is not None)
    try:
        yield Store(engine, location, obstacle, report, upgrades_server=upgrades_server)
    finally:
        engine.dispose()


class Store:
    """An open database, made by `open_store`. See the module's promises."""

    def __init__(
        self,
        engine: Engine,
        location: Location,
        obstacle: KernelDbError | None,
        report: Report,
        *,
        upgrades_server: bool,
    ) -> None:
        self.name = location.name
        self.writable = obstacle is None
        self._obstacle = obstacle
        self._engine = engine
        self._write_engine = connect.for_writing(engine)
        self._file = location.file
        self._report = report
        self._absent_tables: frozenset[str] = frozenset()
        with connect.clear_errors(self.name):
            self.schema_change = self._prepare(upgrades_server)

    def _prepare(self, upgrades_server: bool) -> SchemaChange:
        """Check the revision; create or upgrade, which alone need Alembic and the write lock."""
        with self._engine.connect() as connection:
            before = schema.read_revision(connection, self.name)
        if not self.writable:
            if before is None:
                raise ReadOnlyDatabaseError(f"database {self.name} is empty and cannot be written")
            if before != schema.HEAD:
                return self._only_read(before)
            self._report(f"{self._obstacle}: it is used, and nothing new is kept")
            return SchemaChange(schema.HEAD, schema.HEAD)
        if before == schema.HEAD:
            return SchemaChange(schema.HEAD, schema.HEAD)
        if self._engine.dialect.name == "sqlite" and before is None:
            connect.use_write_ahead_log(self._engine)
        if before is not None and self._file is None and not upgrades_server:
            return self._only_read(before, "; dump it, then run `phasewise db upgrade` with the same --db")
        copies, files = list[Path](), [] if self._file is None else [self._file]
        with self._write_engine.begin() as connection:
            change = schema.upgrade(
                connection, self.name, lambda: copies.extend(map(connect.copy_beside, files))
            )
        if change.before not in (None, schema.HEAD):
            kept = "".join(f"; {copy} is what it was" for copy in copies)
            self._report(f"database {self.name} upgraded from schema {change.before} to {change.after}{kept}")
        return change

    def _only_read(self, revision: str, remedy: str = "") -> SchemaChange:
        """Open an older schema for reading as it is; refuse one whose rows have another meaning by now."""
        self._obstacle = DatabaseTooOldError(
            f"database {self.name} has schema {revision}, older than this phasewise's {schema.HEAD}{remedy}"
        )
        if not schema.is_readable(revision):
            raise self._obstacle
        with self._engine.connect() as connection:
            self._absent_tables = schema.absent_tables(connection)
        self.writable = False
        self._report(f"{self._obstacle}: it is read, and nothing new is kept")
        return SchemaChange(revision, revision)

    def add(self, rows: Iterable[StoredRow]) -> None:
        """Append all rows or none, in this order; each is now the newest of its key."""
        added = list(rows)
        with self.writing() as connection:
            add_rows(connection, added)

    def rows(self, kind: type[R], **equal: object) -> list[R]:
        """The rows of a kind whose fields have these values, oldest first. A field may be one within the
        row's records: `machine`, `core_sig`, `phase`."""
        rows = self._read(kind, *queries.of(kind, **equal))
        return [
            row for row in rows if all(getattr(row, name, value) == value for name, value in equal.items())
        ]

    def stream(self, kind: type[R], **equal: object) -> Iterator[R]:
        """Yield the rows of `rows`, few in memory; the database is read until the last row is taken."""
        return self._read(kind, *queries.of(kind, **equal), at_once=ROWS_AT_ONCE)

    def measurements(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> list[Measurement]:
        """All measurements of a problem on this kind of machine with this build, oldest first."""
        return self.rows(Measurement, problem=problem, machine=machine, kernel_abi=kernel_abi)

    def measurements_of_every_m(
        self, problem: Problem, machine: MachineKey, kernel_abi: str
    ) -> list[Measurement]:
        """The measurements of `measurements` for every m: all that is known about one weight."""
        return [*self._read(Measurement, *queries.of_weight(problem, machine, kernel_abi))]

    def measurement_count(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> int:
        """The number of rows that `measurements` reads."""
        key = queries.of(Measurement, problem=problem, machine=machine, kernel_abi=kernel_abi)
        with self._reading() as connection:
            return connection.scalar(select(func.count()).select_from(MEASUREMENT).where(*key)) or 0

    def begun_ms(
        self, problems: Sequence[Problem], machine: MachineKey, kernel_abi: str, since_ms: int = 0
    ) -> int | None:
        """Unix time of a weight's oldest verified measurement since `since_ms`; None without any."""
        of_weight = queries.of_weight(problems[0], machine, kernel_abi)
        of_problems = PROBLEM.c.m.in_([problem.m for problem in problems])
        counted = MEASUREMENT.c.verified & (MEASUREMENT.c.created_at_ms >= since_ms)
        query = select(func.min(MEASUREMENT.c.created_at_ms)).select_from(MEASUREMENT.join(PROBLEM))
        with self._reading() as connection:
            oldest: int | None = connection.scalar(query.where(*of_weight, of_problems, counted))
        return oldest

    def best_measurement(
        self, problem: Problem, machine: MachineKey, kernel_abi: str, *, verified: bool = True
    ) -> Measurement | None:
        """The measurement of the least estimate of a key, the older of equals; None where there is none."""
        key = {"problem": problem, "machine": machine, "kernel_abi": kernel_abi, "verified": verified}
        order = MEASUREMENT.c.estimate_ns, MEASUREMENT.c.id
        return next(self._read(Measurement, *queries.of(Measurement, **key), order=order, at_once=1), None)

    def key_counts(self, **equal: object) -> list[KeyCount]:
        """Count the measurements of every key that has any with these values (as in `rows`)."""
        with self._reading() as connection:
            return [*counts.count_by_key(connection, self._tell, *queries.of(Measurement, **equal))]

    def promoted_keys(self, *, verified: bool = True, core_sig: str | None = None) -> set[Key]:
        """The keys of `promoted_measurements`: of one kind of core, or of all."""
        where = () if core_sig is None else queries.of(Promotion, core_sig=core_sig)
        with self._reading() as connection:
            return counts.promoted_keys(connection, verified, *where)

    def promoted_measurement(
        self, problem: Problem, machine: MachineKey, kernel_abi: str, *, verified: bool = True
    ) -> Measurement | None:
        """The schedule in use: the newest verified timing of the schedule that was promoted last. None where
        no schedule was promoted, or none that was timed here. verified: False asks for what is in use in the
        database that rows were imported from."""
        key = queries.of(Promotion, problem=problem, machine=machine, kernel_abi=kernel_abi)
        return next(iter(self._promoted(verified, *key)), None)

    def promoted_measurements(
        self, machine: MachineKey | None = None, *, verified: bool = True
    ) -> list[Measurement]:
        """The schedules in use, as `promoted_measurement` chooses them, for each problem and build of every
        kind of machine, or of this kind; ordered by problem."""
        where = () if machine is None else queries.of(Promotion, machine=machine)
        return self._promoted(verified, *where)

    def _promoted(self, verified: bool, *where: ColumnElement[bool]) -> list[Measurement]:
        ids = queries.promoted_ids(verified, *where)
        rows = self._read(Measurement, MEASUREMENT.c.id.in_(ids))
        return sorted(rows, key=lambda row: astuple(row.problem))

    def plans(self) -> list[PlanRecord]:
        """Every plan, oldest first."""
        return self.rows(PlanRecord)

    def newest_plan(self, machine: MachineKey, model_key: str, phase: str) -> PlanRecord | None:
        """The verified plan that was appended last, else the last imported one; None without any. A plan
        changes no answer, so an imported plan is used until one is measured or set here."""
        key = queries.of(PlanRecord, machine=machine, model_key=model_key, phase=phase)
        columns = TABLES[PlanRecord].c
        order = columns.verified.desc(), columns.id.desc()
        return next(self._read(PlanRecord, *key, order=order, at_once=1), None)

    def add_missing(self, rows: Sequence[StoredRow]) -> int:
        """Append the rows that are not there yet, verified or not, all or none; return their number."""
        with self.writing() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _IMPORT_LOCK})

            def stored(kind: type[StoredRow], query: AnySelect) -> Iterator[StoredRow]:
                return self._built(connection, kind, query)

            missing = [*missing_rows(rows, stored)]
            add_rows(connection, missing)
        return len(missing)

    def delete_builds(self, stale_builds: Collection[str], *, dry_run: bool) -> Mapping[str, int]:
        """Delete rows of the builds, then problems and schedules that nothing names any more. Returns the
        number of deleted rows by table; with dry_run they are counted only."""
        tables = [TABLES[kind] for kind in (Measurement, Promotion, StorageDuel, StepTime)]
        deletions = {
            **{table: delete(table).where(table.c.kernel_abi.in_(stale_builds)) for table in tables},
            **{TABLES[kind]: queries.delete_unnamed(kind) for kind in (Problem, Schedule)},
        }
        deleted: Counter[str] = Counter()
        with self.writing() as connection, connection.begin_nested() as savepoint:
            for table, deletion in deletions.items():
                deleted[table.name] += connection.execute(deletion).rowcount
            if dry_run:
                savepoint.rollback()
        return deleted

    def summarise_losers(
        self,
        keep_schedules: int,
        machine: MachineKey | None = None,
        *,
        except_builds: Collection[str] = (),
        dry_run: bool = False,
    ) -> Summarised:
        """Summarise samples of schedules that lost: only the `keep_schedules` fastest of each key and those
        that promotions name keep raw samples. Each other schedule keeps one row, with a summary of its
        samples (`summaries`). Returns the numbers of rows deleted and summarised. Works in small
        transactions: an interrupted call has done a part."""
        where = () if machine is None else queries.of(Measurement, machine=machine)
        with self._reading() as connection:
            losers = summaries.losers(
                connection, keep_schedules, *where, MEASUREMENT.c.kernel_abi.not_in(except_builds)
            )
        n_summarised = 0
        for numbers in batched(losers.best, summaries.ROWS_AT_ONCE):
            with self._reading() if dry_run else self.writing() as connection:
                n_summarised += summaries.summarise(connection, numbers, dry_run=dry_run)
        if not dry_run:
            self._delete(Measurement, losers.others)
        return Summarised(len(losers.others), n_summarised)

    def delete_old(self, keep: int, *, dry_run: bool) -> Mapping[str, int]:
        """Delete, or with dry_run count, rows behind the `keep` newest of their key, verified and imported
        ones apart, for kinds with such a key (`RowKind.newest_of`). Returns numbers of rows by table."""
        deleted = {}
        for kind in KINDS.values():
            if kind.kind.newest_of:
                with self._reading() as connection:
                    old = [*connection.scalars(queries.old_rows(kind, keep))]
                self._delete(kind, () if dry_run else old)
                deleted[kind.kind.table] = len(old)
        return deleted

    def _delete(self, kind: type[StoredRow], numbers: Sequence[int]) -> None:
        for some in batched(numbers, summaries.ROWS_AT_ONCE):
            with self.writing() as connection:
                connection.execute(delete(TABLES[kind]).where(TABLES[kind].c.id.in_(some)))

    def grouped(
        self, kind: type[R], wanted: Callable[[MachineKey], bool] = lambda _: True
    ) -> Iterator[list[R]]:
        """Yield all rows of the wanted machines, one group at a time, in the order of `group_conditions`."""
        if kind.kind.table in self._absent_tables:
            return
        with self._reading() as connection:
            groups = group_conditions(connection, kind, wanted, self._tell)
        for where in groups:
            yield [row for row in self._read(kind, *where) if wanted(row.origin.machine)]

    def stats(self) -> StoreStats:
        """Count the rows by table and by kind of machine."""
        revision, n_bytes = self.schema_change.after, self._file_bytes()
        with self._reading() as connection:
            return counts.stats(connection, self._tell, revision, n_bytes, self._absent_tables)

    def machines(self, *kinds: type[StoredRow]) -> set[MachineKey]:
        """Every kind of machine that has rows of these kinds, or of any kind where none is given."""
        with self._reading() as connection:
            return counts.machines(connection, self._absent_tables, kinds or KINDS.values())

    def _tell(self, what: str) -> None:
        self._report(f"database {self.name}: {what}")

    def _file_bytes(self) -> int | None:
        if self._file is None:
            return None
        log = self._file.with_name(self._file.name + "-wal")
        return self._file.stat().st_size + (log.stat().st_size if log.exists() else 0)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        if self._obstacle is not None:
            raise type(self._obstacle)(f"{self._obstacle}: nothing can be added")
        with connect.clear_errors(self.name), self._write_engine.begin() as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with connect.clear_errors(self.name), self._engine.connect() as connection:
            yield connection

    def _read(
        self,
        kind: type[R],
        *where: ColumnElement[bool],
        order: Sequence[Any] = (),
        at_once: int | None = None,
    ) -> Iterator[R]:
        """The rows of these conditions that keep their record's bounds, oldest first or in `order`. at_once:
        number of rows in memory at one time; None: all."""
        if kind.kind.table in self._absent_tables:
            return
        rows: Any = kind
        query = rows_of(rows).where(*where).order_by(*(order or [TABLES[kind].c.id]))
        with self._reading() as connection:
            yield from self._built(connection, kind, query, at_once)

    def _built(
        self, connection: Connection, kind: type[R], query: AnySelect, at_once: int | None = None
    ) -> Iterator[R]:
        """Make the records of a query of `rows_of`; rows that break their record's bounds are reported."""
        records = SharedRecords(connection, kind)
        if at_once is not None:
            query = query.execution_options(yield_per=at_once)
        for rows in connection.execute(query).partitions(at_once or ROWS_AT_ONCE):
            records.learn(rows)
            for row in rows:
                try:
                    yield records.record_of(row)
                except RecordError as error:
                    self._tell(f"row {row[0]} of {kind.kind.table} is skipped: {error}")


def group_conditions(
    connection: Connection, kind: type[StoredRow], wanted: Callable[[MachineKey], bool], report: Report
) -> Iterator[Condition]:
    """Yield the condition of the rows of each group, in an order that no database changes, for a streamed
    export. A group has a problem, a machine and a build; rows of no problem are grouped by the first two
    columns that name their subject. A reader keeps one group in memory."""
    columns, keys = TABLES[kind].c, list[tuple[tuple[Any, ...], tuple[Any, ...]]]()
    is_of_problem = "problem_id" in columns
    names = queries.KEY_FIELDS if is_of_problem else queries.naming_columns(kind)[:2]
    problems = counts.problems_by_id(connection) if is_of_problem else {}
    own = [columns[name] for name in names]
    for values in map(tuple, connection.execute(select(*own).distinct())):
        if not is_of_problem:
            keys.append((values, values))
            continue
        core, placement, abi, number = values
        problem, machine = problems[number], made(MachineKey, core, placement)
        if isinstance(problem, Problem) and isinstance(machine, MachineKey):
            if wanted(machine):
                keys.append(((*astuple(problem), core, placement, abi), values))
        else:
            broken = problem if isinstance(machine, MachineKey) else machine
            report(f"rows of one problem are left out: {broken}")
    return (tuple(a == b for a, b in zip(own, values, strict=True)) for _, values in sorted(keys))
