"""The store: opens a database, appends records, returns records. Its callers never see SQL.

Promises that every backend keeps (tests/kerneldb/test_store.py runs them on each):
- Rows are appended, never edited; a call that appends several appends all of them or none.
- Keys are content: the same problem or schedule is one row, whichever process writes it first.
- A row that breaks its record's bounds is skipped and reported, and does not hide the good ones.
- Several processes may read and write at once. A `Store` itself belongs to one thread at a time.
- A newer schema is read where the database states that this program may; else refused, nothing touched.
- An older one is read too where it cannot be upgraded: what it has no table for has no rows.
- SQLite is copied beside itself before its schema is upgraded; a server's is upgraded when that is asked for.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Delete, Engine, delete, func, select, text
from sqlalchemy.orm import Session

from phasewise.kerneldb import connect, counts, queries, row_groups, schema, summaries
from phasewise.kerneldb.counts import Key, KeyCount, ProgramCount, StoreStats, TimedKey
from phasewise.kerneldb.errors import (
    DatabaseFullError,
    DatabaseTooNewError,
    DatabaseTooOldError,
    KernelDbError,
    ReadOnlyDatabaseError,
    RecordError,
)
from phasewise.kerneldb.location import Location, locate
from phasewise.kerneldb.models import (
    MeasurementRow,
    ProblemRow,
    PromotionRow,
    ServicePlanRow,
    StepTimeRow,
    StorageDuelRow,
    UserKernelPromotionRow,
    UserKernelTimingRow,
)
from phasewise.kerneldb.queries import PROBLEM_ORDER, of_problem
from phasewise.kerneldb.records import (
    MachineKey,
    Measurement,
    PlanRecord,
    PredictorScore,
    Problem,
    Promotion,
    StepTime,
    StorageDuel,
)
from phasewise.kerneldb.rows import (
    KEPT,
    Shared,
    SharedRecords,
    add_measurements,
    missing_rows,
    narrow_rows_of,
    record_of,
    row_of,
    rows_of,
)
from phasewise.kerneldb.schema import SchemaChange
from phasewise.kerneldb.summaries import Summarised, batched
from phasewise.kerneldb.user_kernels import UserPromotion, UserTiming

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, ColumnExpressionArgument  # 2.0.13, and needed by no call

    from phasewise.kerneldb.queries import AnySelect
    from phasewise.kerneldb.rows import AnyRow
    from phasewise.kerneldb.user_kernels import UserProblem

Report = Callable[[str], None]

T = TypeVar("T")

_IMPORT_LOCK = 0x70687769  # of PostgreSQL: a number that no other program is likely to use

ROWS_AT_ONCE = 500
"""Rows that a scan over a whole table keeps in memory."""

_log = logging.getLogger(__name__)


@contextmanager
def open_store(
    db: str | os.PathLike[str] | None = None,
    report: Report = _log.warning,
    *,
    upgrades_server: bool = False,
) -> Iterator[Store]:
    """Open the database that `db` names (see `locate`), creating it, or upgrading a file, where needed.

    upgrades_server: a server's database of an older schema is upgraded; else it is only read.
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
    """An open database. See the module's promises; made by `open_store`."""

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
        """Check the revision; create or upgrade. Only then are Alembic and the write lock needed."""
        with self._engine.connect() as connection:
            before = schema.read_revision(connection, self.name)
        if before is not None and schema.is_newer(before):
            return self._only_read(before)
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
        if schema.is_newer(change.after):  # by another process, since it was looked at
            return self._only_read(change.after)
        if change.before not in (None, schema.HEAD):
            kept = "".join(f"; {copy} is what it was" for copy in copies)
            self._report(f"database {self.name} upgraded from schema {change.before} to {change.after}{kept}")
        return change

    def _only_read(self, revision: str, remedy: str = "") -> SchemaChange:
        """A newer program states that the database can be read, or none since an older one broke with it."""
        has = f"database {self.name} has schema {revision}"
        if schema.is_newer(revision):
            self._obstacle = DatabaseTooNewError(f"{has}, newer than this phasewise's {schema.HEAD}")
            advice = "; upgrade phasewise"
        else:
            self._obstacle = DatabaseTooOldError(f"{has}, older than this phasewise's {schema.HEAD}{remedy}")
            advice = ""
            if not schema.is_readable(revision):
                raise self._obstacle
            with self._engine.connect() as connection:
                self._absent_tables = schema.absent_tables(connection)
        self.writable = False
        self._report(f"{self._obstacle}: it is read, and nothing new is kept{advice}")
        return SchemaChange(revision, revision)

    def add_measurements(self, measurements: Iterable[Measurement]) -> None:
        """Append all or none."""
        added = list(measurements)
        with self.writing() as session:
            add_measurements(session, added)

    def measurements(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> list[Measurement]:
        """Everything measured for a problem on this kind of machine with this build, oldest first."""
        return self._records(Measurement, *of_problem(MeasurementRow, problem, machine, kernel_abi))

    def measurements_of_every_m(
        self, problem: Problem, machine: MachineKey, kernel_abi: str
    ) -> list[Measurement]:
        """As `measurements`, whatever the problem's m is: all that is known about one weight."""
        return self._records(Measurement, *queries.of_weight(MeasurementRow, problem, machine, kernel_abi))

    def measurement_count(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> int:
        """The number of rows that `measurements` reads; tells cheaply whether another process has added
        some.
        """
        key = queries.key_parameters(problem, machine, kernel_abi)
        with connect.clear_errors(self.name), self._engine.connect() as connection:
            return connection.scalar(queries.measurement_count(), key) or 0

    def begun_ms(
        self, problems: Sequence[Problem], machine: MachineKey, kernel_abi: str, since_ms: int = 0
    ) -> int | None:
        """Unix time of the oldest verified row from then on of problems of a weight; None: there is none."""
        of_weight = queries.of_weight(MeasurementRow, problems[0], machine, kernel_abi)
        of_problems = ProblemRow.m.in_([problem.m for problem in problems])
        counts = MeasurementRow.verified & (MeasurementRow.created_at_ms >= since_ms)
        query = select(func.min(MeasurementRow.created_at_ms)).select_from(MeasurementRow).join(ProblemRow)
        with self._reading() as session:
            return session.scalar(query.where(*of_weight, of_problems, counts))

    def all_measurements(self, machine: MachineKey | None = None) -> Iterator[Measurement]:
        """Every row, or those of one kind of machine; oldest first, read while they are taken."""
        where = () if machine is None else (queries.of_machine(MeasurementRow, machine),)
        return self._streamed(Measurement, *where)

    def best_measurement(
        self, problem: Problem, machine: MachineKey, kernel_abi: str, *, verified: bool = True
    ) -> Measurement | None:
        """The least estimate of a key, and the older of equals; None where there is none."""
        condition, *order = queries.of_best(verified)
        query = rows_of(Measurement).where(
            *of_problem(MeasurementRow, problem, machine, kernel_abi), condition
        )
        return self._first(Measurement, query.order_by(*order))

    def key_counts(self, machine: MachineKey | None = None, *, core_sig: str | None = None) -> list[KeyCount]:
        """Every key that has measurements, and how many: of one kind of machine or core, or of all."""
        where = [] if machine is None else [queries.of_machine(MeasurementRow, machine)]
        if core_sig is not None:
            where.append(MeasurementRow.core_sig == core_sig)
        with self._reading() as session:
            return [*counts.count_by_key(session, self._tell, *where)]

    def timed_keys(self, core_sig: str | None = None) -> list[TimedKey]:
        """The keys of `key_counts`, without counting: of one kind of core, or of all."""
        with self._reading() as session:
            return [*counts.timed_keys(session, self._tell, core_sig)]

    def promoted_keys(self, *, verified: bool = True, core_sig: str | None = None) -> set[Key]:
        """The keys of `promoted_measurements`: of one kind of core, or of all."""
        where = [] if core_sig is None else [PromotionRow.core_sig == core_sig]
        with self._reading() as session:
            return counts.promoted_keys(session, verified, *where)

    def add_promotions(self, promotions: Iterable[Promotion]) -> None:
        """Append all or none; from now on each is the newest of its key."""
        self._append(promotions)

    def promotions(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> list[Promotion]:
        """Every promotion for a problem on this kind of machine with this build, oldest first."""
        return self._records(Promotion, *of_problem(PromotionRow, problem, machine, kernel_abi))

    def all_promotions(self) -> Iterator[Promotion]:
        """Every row, oldest first, read while they are taken."""
        return self._streamed(Promotion)

    def add_storage_duels(self, duels: Iterable[StorageDuel]) -> None:
        """Append all or none; from now on each is the newest of its key."""
        self._append(duels)

    def storage_duels(self, machine: MachineKey, kernel_abi: str) -> list[StorageDuel]:
        """Every verified duel between storages on this kind of machine with this build, oldest first."""
        return self._records(
            StorageDuel,
            queries.of_machine(StorageDuelRow, machine),
            StorageDuelRow.kernel_abi == kernel_abi,
            StorageDuelRow.verified,
        )

    def all_storage_duels(self) -> Iterator[StorageDuel]:
        """Every row, oldest first, read while they are taken."""
        return self._streamed(StorageDuel)

    def promoted_measurement(
        self, problem: Problem, machine: MachineKey, kernel_abi: str, *, verified: bool = True
    ) -> Measurement | None:
        """The schedule in use: the newest verified timing of the schedule that was promoted last.

        None where no schedule was promoted, or none that was timed here. Not `verified`: what would be in use
        where it was imported from.
        """
        key = of_problem(PromotionRow, problem, machine, kernel_abi)
        return next(iter(self._promoted(verified, *key)), None)

    def promoted_measurements(
        self, machine: MachineKey | None = None, *, verified: bool = True
    ) -> list[Measurement]:
        """The schedules in use for each problem, build and kind of machine (or this kind); ordered by
        problem.
        """
        where = () if machine is None else (queries.of_machine(PromotionRow, machine),)
        return self._promoted(verified, *where)

    def _promoted(self, verified: bool, *where: ColumnElement[bool]) -> list[Measurement]:
        ids = queries.promoted_ids(verified, *where)
        query = rows_of(Measurement).where(MeasurementRow.id.in_(ids))
        return [*self._read(Measurement, query.order_by(*PROBLEM_ORDER, MeasurementRow.id))]

    def add_missing(self, rows: Sequence[Shared]) -> int:
        """Append those that are not there yet, verified or not, all or none; return how many those were."""
        with self.writing() as session:
            if session.get_bind().dialect.name == "postgresql":
                session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _IMPORT_LOCK})
            missing = [*missing_rows(session, rows, self._built)]
            add_measurements(session, [row for row in missing if isinstance(row, Measurement)])
            session.add_all([row_of(session, row) for row in missing if not isinstance(row, Measurement)])
        return len(missing)

    def delete_builds(
        self, stale_builds: Collection[str], *, dry_run: bool, successors: Mapping[str, str] | None = None
    ) -> Mapping[str, int]:
        """Delete rows of the builds, with problems and schedules that nothing names any more.

        successors: by stale build the one of the same kernels that its imported winners are hints for; those
        stay (`queries.imported_hints`). Returns the rows deleted by table, or those that would be.
        """
        followed = successors or {}
        hints = [
            MeasurementRow.id.not_in(queries.imported_hints([*same], current))
            for current, same in groupby(sorted(followed, key=followed.__getitem__), followed.__getitem__)
        ]
        deletions: list[tuple[str, Delete]] = [
            (
                MeasurementRow.__tablename__,
                delete(MeasurementRow).where(MeasurementRow.kernel_abi.in_(stale_builds), *hints),
            ),
            (PromotionRow.__tablename__, delete(PromotionRow).where(queries.without_timing(stale_builds))),
            *(
                (model.__tablename__, delete(model).where(model.kernel_abi.in_(stale_builds)))
                for model in (StorageDuelRow, StepTimeRow)
            ),
            ("problem", queries.delete_unused_problems()),
            ("schedule", queries.delete_unused_schedules()),
        ]
        deleted: Counter[str] = Counter()
        with self.writing() as session, session.begin_nested() as savepoint:
            for table, deletion in deletions:
                result: Any = session.execute(deletion, execution_options={"synchronize_session": False})
                deleted[table] += result.rowcount
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
        """Keep raw samples of the fastest schedules of each key and of those that promotions name.

        Of any other one row is left, with a summary of its samples (`summaries`). Returns the numbers of rows
        deleted and summarised. A few rows at a time: interrupted, it has done a part.
        """
        where = [] if machine is None else [queries.of_machine(MeasurementRow, machine)]
        where.append(MeasurementRow.kernel_abi.not_in(except_builds))
        with self._reading() as session:
            losers = summaries.losers(session, keep_schedules, *where)
        n_summarised = 0
        for numbers in batched(losers.best, summaries.ROWS_AT_ONCE):
            with self._reading() if dry_run else self.writing() as session:
                n_summarised += summaries.summarise(session, numbers, dry_run=dry_run)
        for numbers in batched(() if dry_run else losers.others, summaries.ROWS_AT_ONCE):
            with self.writing() as session:
                session.execute(
                    delete(MeasurementRow).where(MeasurementRow.id.in_(numbers)),
                    execution_options={"synchronize_session": False},
                )
        return Summarised(len(losers.others), n_summarised)

    def add_plan(self, plan: PlanRecord) -> None:
        """Append a plan; from now on it is the newest of its key."""
        self._append([plan])

    def newest_plan(self, machine: MachineKey, model_key: str, phase: str) -> PlanRecord | None:
        """The verified plan that was appended last, else the imported one; None where there is none.

        A plan changes no answer, so that one from elsewhere is used until one is measured or set here.
        """
        query = rows_of(PlanRecord).where(
            queries.of_machine(ServicePlanRow, machine),
            ServicePlanRow.model_key == model_key,
            ServicePlanRow.phase == phase,
        )
        return self._first(
            PlanRecord, query.order_by(ServicePlanRow.verified.desc(), ServicePlanRow.id.desc())
        )

    def plans(self) -> list[PlanRecord]:
        """Every plan, oldest first."""
        return self._records(PlanRecord)

    def delete_old(self, keep: int, *, dry_run: bool) -> Mapping[str, int]:
        """Delete plans and scores of predictors behind the `keep` newest of their key, those made here and
        those imported; or count them. By table.
        """
        deleted = {}
        for model in queries.OLD_BEHIND:
            with self._reading() if dry_run else self.writing() as session:
                old = [*session.scalars(queries.old_rows(model, keep))]
                for numbers in batched(() if dry_run else old, summaries.ROWS_AT_ONCE):
                    session.execute(delete(model).where(model.id.in_(numbers)))
            deleted[model.__tablename__] = len(old)
        return deleted

    def add_predictor_scores(self, scores: Iterable[PredictorScore]) -> None:
        """Append all or none."""
        self._append(scores)

    def predictor_scores(self) -> list[PredictorScore]:
        """Every score, oldest first."""
        return self._records(PredictorScore)

    def add_step_times(self, timings: Iterable[StepTime]) -> None:
        """Append all or none."""
        self._append(timings)

    def step_times(self, machine: MachineKey, model_key: str, phase: str) -> list[StepTime]:
        """Every timing of a phase's steps of a model on this kind of machine, oldest first."""
        return self._records(
            StepTime,
            queries.of_machine(StepTimeRow, machine),
            StepTimeRow.model_key == model_key,
            StepTimeRow.phase == phase,
        )

    def all_step_times(self) -> Iterator[StepTime]:
        """Every row, oldest first, read while they are taken."""
        return self._streamed(StepTime)

    def add_user_timings(self, timings: Iterable[UserTiming]) -> None:
        """Append all or none."""
        self._append(timings)

    def user_timings(self, problem: UserProblem, core_sig: str) -> list[UserTiming]:
        """Every verified timing of a user's kernel on a shape on this kind of core, oldest first."""
        timings = self._records(
            UserTiming,
            UserKernelTimingRow.core_sig == core_sig,
            UserKernelTimingRow.kernel_abi == problem.kernel_abi,
            UserKernelTimingRow.verified,
        )
        return [timing for timing in timings if timing.problem == problem]

    def add_user_promotion(self, promotion: UserPromotion) -> None:
        """Append it; from now on it is the newest of its key."""
        self._append([promotion])

    def user_promotions(
        self, kernel_abi: str | None = None, core_sig: str | None = None, *, verified: bool = True
    ) -> list[UserPromotion]:
        """Promotions of users' kernels, oldest first: of one build, of one kind of core, or all.

        verified: those fought here; else those that were imported.
        """
        wanted = [UserKernelPromotionRow.verified == verified]
        if kernel_abi is not None:
            wanted.append(UserKernelPromotionRow.kernel_abi == kernel_abi)
        if core_sig is not None:
            wanted.append(UserKernelPromotionRow.core_sig == core_sig)
        return self._records(UserPromotion, *wanted)

    def all_user_kernels(self) -> Iterator[UserTiming | UserPromotion]:
        """Every row about users' kernels, timings first, oldest first, read while they are taken."""
        yield from self._streamed(UserTiming)
        yield from self._streamed(UserPromotion)

    def grouped(
        self, record: type[Shared], wanted: Callable[[MachineKey], bool] = lambda _: True
    ) -> Iterator[list[Any]]:
        """All rows of machines that are wanted, the rows of a key (`row_groups`) at a time, in key order."""
        if self._lacks(record):
            return
        with self._reading() as session:
            groups = row_groups.conditions(session, record, wanted, self._tell)
        shared, model = SharedRecords(), KEPT[record].model
        kind: Any = record
        for where in groups:
            with self._reading() as session:
                query = narrow_rows_of(kind).where(*where).order_by(model.id)
                rows: Sequence[AnyRow] = session.connection().execute(query).all()
                shared.learn(session, record, rows)
            built = self._built(record, rows, shared.record_of)
            yield [row for row in built if wanted(row.origin.machine)]

    def stats(self) -> StoreStats:
        """Rows by table and by kind of machine."""
        with self._reading() as session:
            return counts.stats(session, self._tell, self.schema_change.after, self._file_bytes())

    def plan_machines(self) -> set[MachineKey]:
        """The kinds of machine that have plans or step times."""
        with self._reading() as session:
            return counts.plan_machines(session)

    def machines(self) -> set[MachineKey]:
        """Every kind of machine that rows are of."""
        with self._reading() as session:
            return counts.machines(session)

    def programs(self, core_sig: str) -> Mapping[str, list[ProgramCount]]:
        """Measurements, promotions and plans of one kind of core, by the program that wrote them."""
        tables: tuple[type[MeasurementRow | PromotionRow | ServicePlanRow], ...] = (
            *(MeasurementRow, PromotionRow, ServicePlanRow),
        )
        with self._reading() as session:
            return {table.__tablename__: counts.programs(session, table, core_sig) for table in tables}

    def _tell(self, what: str) -> None:
        self._report(f"database {self.name}: {what}")

    def _file_bytes(self) -> int | None:
        if self._file is None:
            return None
        log = self._file.with_name(self._file.name + "-wal")
        return self._file.stat().st_size + (log.stat().st_size if log.exists() else 0)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        if self._obstacle is not None:
            raise type(self._obstacle)(f"{self._obstacle}: nothing can be added")
        with connect.clear_errors(self.name), Session(self._write_engine) as session, session.begin():
            yield session

    def _append(self, records: Iterable[object]) -> None:
        with self.writing() as session:
            session.add_all([row_of(session, record) for record in records])

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        info = {counts.ABSENT: self._absent_tables}
        with connect.clear_errors(self.name), Session(self._engine, info=info) as session:
            yield session

    def _lacks(self, record: type) -> bool:
        """True if the schema is older than the record's table."""
        return KEPT[record].model.__tablename__ in self._absent_tables

    def _records(self, record: type[T], *where: ColumnExpressionArgument[bool]) -> list[T]:
        """The rows of these conditions that keep their record's bounds, oldest first."""
        return [*self._read(record, rows_of(record).where(*where).order_by(KEPT[record].model.id))]

    def _read(self, record: type[T], query: AnySelect) -> Iterator[T]:
        if self._lacks(record):
            return iter(())
        with self._reading() as session:
            rows: Sequence[AnyRow] = session.execute(query).all()
        return self._built(record, rows)

    def _first(self, record: type[T], query: AnySelect) -> T | None:
        """The first row that keeps its record's bounds."""
        if self._lacks(record):
            return None
        with self._reading() as session:
            return next(self._built(record, session.execute(query.execution_options(yield_per=1))), None)

    def _streamed(self, record: type[T], *where: ColumnExpressionArgument[bool]) -> Iterator[T]:
        """All rows, few of them in memory; the database is being read until the last one is taken."""
        if self._lacks(record):
            return
        query = rows_of(record).where(*where).order_by(KEPT[record].model.id)
        with self._reading() as session:
            yield from self._built(record, session.execute(query.execution_options(yield_per=ROWS_AT_ONCE)))

    def _built(
        self,
        record: type[T],
        rows: Iterable[AnyRow],
        make: Callable[[type[T], AnyRow], T] = record_of,
    ) -> Iterator[T]:
        """Rows that break their record's bounds are reported."""
        for row in rows:
            try:
                yield make(record, row)
            except RecordError as error:
                self._tell(f"row {row[0]} of {KEPT[record].model.__tablename__} is skipped: {error}")
