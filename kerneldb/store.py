"""The store: opens a database, appends records, returns records. Its callers never see SQL.

Promises that every backend keeps (tests/kerneldb/test_store.py runs them on each):
- Rows are appended, never edited; a call that appends several appends all of them or none.
- Keys are content: the same problem or schedule is one row, whichever process writes it first.
- A row that breaks its record's bounds is skipped and reported, and does not hide the good ones.
- Several processes may read and write at once. A `Store` itself belongs to one thread at a time.
- A newer schema is read where the database states that this program may; else refused, nothing touched.
- SQLite is copied beside itself before its schema is upgraded; a server's is upgraded when that is asked for.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Delete, Engine, delete, func, select, text
from sqlalchemy.orm import Session

from phasewise.kerneldb import connect, queries, user_kernels
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
    Base,
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
    Problem,
    Promotion,
    StepTime,
    StorageDuel,
)
from phasewise.kerneldb.rows import (
    add_measurements,
    measurement_of,
    plan_of,
    plan_row,
    promotion_of,
    promotion_row,
    step_time_of,
    step_time_row,
    storage_duel_of,
    storage_duel_row,
)
from phasewise.kerneldb.schema import HEAD, SchemaChange, is_newer, read_revision, upgrade
from phasewise.kerneldb.schema_copy import copy_beside
from phasewise.kerneldb.user_kernels import UserPromotion, UserTiming

if TYPE_CHECKING:
    from phasewise.kerneldb.queries import AnySelect
    from phasewise.kerneldb.rows import AnyRow
    from phasewise.kerneldb.user_kernels import UserProblem

Report = Callable[[str], None]
Shared: TypeAlias = Measurement | Promotion | StorageDuel | StepTime | UserTiming | UserPromotion
"""The kinds of rows that databases may give to each other."""

T = TypeVar("T")

_IMPORT_LOCK = 0x70687769  # of PostgreSQL: a number that no other program is likely to use

ROWS_AT_ONCE = 500
"""Rows that a scan over a whole table keeps in memory."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SignatureCount:
    """The number of rows of one kind of machine."""

    machine: MachineKey
    measurements: int
    service_plans: int
    step_times: int


@dataclass(frozen=True)
class BuildCount:
    """The number of rows of one build of a kernel family."""

    kernel_abi: str
    measurements: int
    unverified: int
    """Measurements that were imported and not measured here."""


@dataclass(frozen=True)
class StoreStats:
    """Sizes. `file_bytes` is None where the database is no local file."""

    revision: str
    rows: Mapping[str, int]
    signatures: tuple[SignatureCount, ...]
    builds: tuple[BuildCount, ...]
    file_bytes: int | None


@contextmanager
def open_store(
    db: str | os.PathLike[str] | None = None,
    report: Report = _log.warning,
    *,
    upgrades_server: bool = False,
) -> Iterator[Store]:
    """Open the database that `db` names (see `locate`), creating it, or upgrading a file, where needed.

    upgrades_server: a server's database of an older schema is upgraded; else it is refused.
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
        with connect.clear_errors(self.name):
            self.schema_change = self._prepare(upgrades_server)

    def _prepare(self, upgrades_server: bool) -> SchemaChange:
        """Check the revision; create or upgrade. Only then are Alembic and the write lock needed."""
        with self._engine.connect() as connection:
            before = read_revision(connection, self.name)
        if before is not None and is_newer(before):
            return self._only_read(before)
        if not self.writable:
            if before != HEAD:
                state = f"has schema {before}, older than {HEAD}," if before else "is empty"
                raise ReadOnlyDatabaseError(f"database {self.name} {state} and cannot be written")
            self._report(f"{self._obstacle}: it is used, and nothing new is kept")
            return SchemaChange(HEAD, HEAD)
        if before == HEAD:
            return SchemaChange(HEAD, HEAD)
        if self._engine.dialect.name == "sqlite" and before is None:
            connect.use_write_ahead_log(self._engine)
        if before is not None and self._file is None and not upgrades_server:
            raise DatabaseTooOldError(
                f"database {self.name} has schema {before}, older than this phasewise's {HEAD}: "
                "dump it, then run `phasewise db upgrade` with the same --db"
            )
        copies: list[Path] = []
        with self._write_engine.begin() as connection:
            change = upgrade(connection, self.name, lambda: copies.extend(self._copy()))
        if is_newer(change.after):  # by another process, since it was looked at
            return self._only_read(change.after)
        if change.before not in (None, HEAD):
            kept = "".join(f"; {copy} is what it was" for copy in copies)
            self._report(f"database {self.name} upgraded from schema {change.before} to {change.after}{kept}")
        return change

    def _only_read(self, revision: str) -> SchemaChange:
        """A newer program has upgraded the database, and states that it can be read."""
        self._obstacle = DatabaseTooNewError(
            f"database {self.name} has schema {revision}, newer than this phasewise's {HEAD}"
        )
        self.writable = False
        self._report(f"{self._obstacle}: it is read, and nothing new is kept; upgrade phasewise")
        return SchemaChange(revision, revision)

    def _copy(self) -> Iterator[Path]:
        if self._file is not None:
            yield copy_beside(self._file)

    def add_measurements(self, measurements: Iterable[Measurement]) -> None:
        """Append all or none."""
        added = list(measurements)
        with self._writing() as session:
            add_measurements(session, added)

    def measurements(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> list[Measurement]:
        """Everything measured for a problem on this kind of machine with this build, oldest first."""
        query = queries.measurements().where(*of_problem(MeasurementRow, problem, machine, kernel_abi))
        return list(self._records(query.order_by(MeasurementRow.id), measurement_of))

    def measurements_of_every_m(
        self, problem: Problem, machine: MachineKey, kernel_abi: str
    ) -> list[Measurement]:
        """As `measurements`, whatever the problem's m is: all that is known about one weight."""
        of_weight = queries.of_weight(MeasurementRow, problem, machine, kernel_abi)
        query = queries.measurements().where(*of_weight).order_by(MeasurementRow.id)
        return list(self._records(query, measurement_of))

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
        with connect.clear_errors(self.name), Session(self._engine) as session:
            return session.scalar(query.where(*of_weight, of_problems, counts))

    def all_measurements(self) -> Iterator[Measurement]:
        """Every row, oldest first, read while they are taken."""
        return self._streamed(queries.measurements().order_by(MeasurementRow.id), measurement_of)

    def best_measurement(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> Measurement | None:
        """The verified one with the least estimate, the older of equals; None where nothing was measured."""
        query = queries.measurements().where(*of_problem(MeasurementRow, problem, machine, kernel_abi))
        query = query.where(MeasurementRow.verified).order_by(MeasurementRow.estimate_ns, MeasurementRow.id)
        return next(self._records(query, measurement_of), None)

    def best_measurements(self, *, verified: bool = True) -> list[Measurement]:
        """The best one for each problem, kind of machine and build of the kernel; ordered by problem."""
        query = queries.best_measurements(verified).order_by(*PROBLEM_ORDER, MeasurementRow.id)
        return list(self._records(query, measurement_of))

    def add_promotions(self, promotions: Iterable[Promotion]) -> None:
        """Append all or none; from now on each is the newest of its key."""
        with self._writing() as session:
            session.add_all([promotion_row(session, promotion) for promotion in promotions])

    def promotions(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> list[Promotion]:
        """Every promotion for a problem on this kind of machine with this build, oldest first."""
        query = queries.promotions().where(*of_problem(PromotionRow, problem, machine, kernel_abi))
        return list(self._records(query.order_by(PromotionRow.id), promotion_of))

    def all_promotions(self) -> Iterator[Promotion]:
        """Every row, oldest first, read while they are taken."""
        return self._streamed(queries.promotions().order_by(PromotionRow.id), promotion_of)

    def add_storage_duels(self, duels: Iterable[StorageDuel]) -> None:
        """Append all or none; from now on each is the newest of its key."""
        with self._writing() as session:
            session.add_all([storage_duel_row(session, duel) for duel in duels])

    def storage_duels(self, machine: MachineKey, kernel_abi: str) -> list[StorageDuel]:
        """Every verified duel between storages on this kind of machine with this build, oldest first."""
        query = queries.storage_duels().where(
            queries.of_machine(StorageDuelRow, machine),
            StorageDuelRow.kernel_abi == kernel_abi,
            StorageDuelRow.verified,
        )
        return list(self._records(query.order_by(StorageDuelRow.id), storage_duel_of))

    def all_storage_duels(self) -> Iterator[StorageDuel]:
        """Every row, oldest first, read while they are taken."""
        return self._streamed(queries.storage_duels().order_by(StorageDuelRow.id), storage_duel_of)

    def promoted_measurement(
        self, problem: Problem, machine: MachineKey, kernel_abi: str
    ) -> Measurement | None:
        """The schedule in use: the newest verified timing of the schedule that was promoted last.

        None where no schedule was promoted, or none that was timed here.
        """
        key = of_problem(MeasurementRow, problem, machine, kernel_abi)
        query = queries.promoted_measurements(verified=True).where(*key)
        return next(self._records(query, measurement_of), None)

    def promoted_measurements(
        self, machine: MachineKey | None = None, *, verified: bool = True
    ) -> list[Measurement]:
        """The schedules in use for each problem, build and kind of machine (or this kind); ordered by
        problem.

        Not `verified`: what would be in use where it was imported from.
        """
        query = queries.promoted_measurements(verified).order_by(*PROBLEM_ORDER, MeasurementRow.id)
        if machine:
            query = query.where(queries.of_machine(MeasurementRow, machine))
        return list(self._records(query, measurement_of))

    def add_missing(self, rows: Sequence[Shared]) -> int:
        """Append those that are not there yet, verified or not, all or none; return how many those were."""
        with self._writing() as session:
            if session.get_bind().dialect.name == "postgresql":
                session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _IMPORT_LOCK})
            missing = [*self._missing(session, rows)]
            add_measurements(session, [row for row in missing if isinstance(row, Measurement)])
            session.add_all([_row_of(session, row) for row in missing if not isinstance(row, Measurement)])
        return len(missing)

    def _missing(self, session: Session, rows: Iterable[Shared]) -> Iterator[Shared]:
        """Rows of a key at a time are compared with what the key has of the same instants."""
        known: set[Shared] = set()
        for _, same_key in groupby(rows, _key_of):
            group = [*same_key]
            instants = {row.origin.created_at_ms for row in group}
            query, build = _same_key_as(group[0], instants)
            known |= {_content_of(row) for row in self._built(session.execute(query), build)}
            for row in group:
                if _content_of(row) not in known:
                    known.add(_content_of(row))
                    yield row

    def collect_garbage(
        self, stale_builds: Collection[str], keep_schedules: int | None, *, dry_run: bool
    ) -> Mapping[str, int]:
        """Delete rows of the builds, and timings of schedules behind the `keep_schedules` fastest of a key.

        Problems and schedules that nothing names any more go with them. Returns the rows deleted by table, or
        those that would be.
        """
        deletions: list[tuple[str, Delete]] = [
            (model.__tablename__, delete(model).where(model.kernel_abi.in_(stale_builds)))
            for model in (PromotionRow, StorageDuelRow, MeasurementRow, StepTimeRow)
        ]
        if keep_schedules is not None:
            deletions.append((MeasurementRow.__tablename__, queries.delete_dominated(keep_schedules)))
        deletions += [
            ("problem", queries.delete_unused_problems()),
            ("schedule", queries.delete_unused_schedules()),
        ]
        deleted: Counter[str] = Counter()
        with self._writing() as session, session.begin_nested() as savepoint:
            for table, deletion in deletions:
                result: Any = session.execute(deletion, execution_options={"synchronize_session": False})
                deleted[table] += result.rowcount
            if dry_run:
                savepoint.rollback()
        return deleted

    def add_plan(self, plan: PlanRecord) -> None:
        """Append a plan; from now on it is the newest of its key."""
        with self._writing() as session:
            session.add(plan_row(plan))

    def newest_plan(self, machine: MachineKey, model_key: str, phase: str) -> PlanRecord | None:
        """The verified plan that was appended last, None where there is none."""
        query = (
            select(ServicePlanRow)
            .where(
                ServicePlanRow.model_key == model_key,
                ServicePlanRow.phase == phase,
                ServicePlanRow.core_sig == machine.core_sig,
                ServicePlanRow.placement_sig == machine.placement_sig,
                ServicePlanRow.verified,
            )
            .order_by(ServicePlanRow.id.desc())
        )
        return next(self._records(query, plan_of), None)

    def plans(self) -> list[PlanRecord]:
        """Every plan, oldest first."""
        return list(self._records(select(ServicePlanRow).order_by(ServicePlanRow.id), plan_of))

    def add_step_times(self, timings: Iterable[StepTime]) -> None:
        """Append all or none."""
        with self._writing() as session:
            session.add_all([step_time_row(timing) for timing in timings])

    def step_times(self, machine: MachineKey, model_key: str, phase: str) -> list[StepTime]:
        """Every timing of a phase's steps of a model on this kind of machine, oldest first."""
        query = queries.step_times().where(
            StepTimeRow.model_key == model_key,
            StepTimeRow.phase == phase,
            queries.of_machine(StepTimeRow, machine),
        )
        return list(self._records(query, step_time_of))

    def all_step_times(self) -> Iterator[StepTime]:
        """Every row, oldest first, read while they are taken."""
        return self._streamed(queries.step_times(), step_time_of)

    def add_user_timings(self, timings: Iterable[UserTiming]) -> None:
        """Append all or none."""
        with self._writing() as session:
            session.add_all([user_kernels.timing_row(one) for one in timings])

    def user_timings(self, problem: UserProblem, core_sig: str) -> list[UserTiming]:
        """Every verified timing of a user's kernel on a shape on this kind of core, oldest first."""
        query = (
            select(UserKernelTimingRow)
            .where(
                UserKernelTimingRow.core_sig == core_sig,
                UserKernelTimingRow.kernel_abi == problem.kernel_abi,
                UserKernelTimingRow.verified,
            )
            .order_by(UserKernelTimingRow.id)
        )
        found = self._records(query, lambda row: user_kernels.timing_of(row[0]))
        return [one for one in found if one.problem == problem]

    def add_user_promotion(self, promotion: UserPromotion) -> None:
        """Append it; from now on it is the newest of its key."""
        with self._writing() as session:
            session.add(user_kernels.promotion_row(promotion))

    def user_promotions(
        self, kernel_abi: str | None = None, core_sig: str | None = None, *, verified: bool = True
    ) -> list[UserPromotion]:
        """Promotions of users' kernels, oldest first: of one build, of one kind of core, or all.

        verified: those fought here; else those that were imported.
        """
        query = select(UserKernelPromotionRow).where(UserKernelPromotionRow.verified == verified)
        if kernel_abi is not None:
            query = query.where(UserKernelPromotionRow.kernel_abi == kernel_abi)
        if core_sig is not None:
            query = query.where(UserKernelPromotionRow.core_sig == core_sig)
        ordered = query.order_by(UserKernelPromotionRow.id)
        return [*self._records(ordered, lambda row: user_kernels.promotion_of(row[0]))]

    def all_user_kernels(self) -> Iterator[UserTiming | UserPromotion]:
        """Every row about users' kernels, timings first, oldest first, read while they are taken."""
        timings = select(UserKernelTimingRow).order_by(UserKernelTimingRow.id)
        yield from self._streamed(timings, lambda row: user_kernels.timing_of(row[0]))
        promotions = select(UserKernelPromotionRow).order_by(UserKernelPromotionRow.id)
        yield from self._streamed(promotions, lambda row: user_kernels.promotion_of(row[0]))

    def stats(self) -> StoreStats:
        """Rows by table and by kind of machine."""
        with connect.clear_errors(self.name), Session(self._engine) as session:
            rows = {
                name: session.scalar(select(func.count()).select_from(table)) or 0
                for name, table in sorted(Base.metadata.tables.items())
            }
            counts = tuple(
                _count_by_machine(session, model) for model in (MeasurementRow, ServicePlanRow, StepTimeRow)
            )
            builds = tuple(
                BuildCount(kernel_abi, count, count - verified)
                for kernel_abi, count, verified in session.execute(queries.count_by_build())
            )
        signatures = tuple(self._signatures(counts))
        return StoreStats(self.schema_change.after, rows, signatures, builds, self._file_bytes())

    def _signatures(self, counts: Sequence[Mapping[tuple[str, str], int]]) -> Iterator[SignatureCount]:
        for key in sorted({key for of_table in counts for key in of_table}, key=repr):
            try:
                yield SignatureCount(MachineKey(*key), *(of_table.get(key, 0) for of_table in counts))
            except RecordError as error:
                self._report(f"database {self.name}: rows of one machine are not counted: {error}")

    def _file_bytes(self) -> int | None:
        if self._file is None:
            return None
        log = self._file.with_name(self._file.name + "-wal")
        return self._file.stat().st_size + (log.stat().st_size if log.exists() else 0)

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        if self._obstacle is not None:
            raise type(self._obstacle)(f"{self._obstacle}: nothing can be added")
        with connect.clear_errors(self.name), Session(self._write_engine) as session, session.begin():
            yield session

    def _records(self, query: AnySelect, build: Callable[[AnyRow], T]) -> Iterator[T]:
        """The rows that keep their record's bounds; the others are reported. Rows begin with the entity."""
        with connect.clear_errors(self.name), Session(self._engine) as session:
            rows: Sequence[AnyRow] = session.execute(query).all()
        return self._built(rows, build)

    def _streamed(self, query: AnySelect, build: Callable[[AnyRow], T]) -> Iterator[T]:
        """As `_records`, with few rows in memory; the database is being read until the last one is taken."""
        with connect.clear_errors(self.name), Session(self._engine) as session:
            yield from self._built(session.execute(query.execution_options(yield_per=ROWS_AT_ONCE)), build)

    def _built(self, rows: Iterable[AnyRow], build: Callable[[AnyRow], T]) -> Iterator[T]:
        for row in rows:
            try:
                yield build(row)
            except RecordError as error:
                table = row[0].__tablename__
                self._report(f"database {self.name}: row {row[0].id} of {table} is skipped: {error}")


def _row_of(session: Session, row: Promotion | StorageDuel | StepTime | UserTiming | UserPromotion) -> Base:
    match row:
        case UserTiming():
            return user_kernels.timing_row(row)
        case UserPromotion():
            return user_kernels.promotion_row(row)
        case Promotion():
            return promotion_row(session, row)
        case StorageDuel():
            return storage_duel_row(session, row)
        case StepTime():
            return step_time_row(row)


def _key_of(row: Shared) -> tuple[object, ...]:
    of_key = (row.model_key, row.configuration_key, row.step) if isinstance(row, StepTime) else (row.problem,)
    return (type(row).__name__, *of_key, row.origin.machine, row.kernel_abi)


def _same_key_as(row: Shared, instants: Collection[int]) -> tuple[AnySelect, Callable[[AnyRow], Any]]:
    """The stored rows of a row's key and of these instants, and the reader of them."""
    machine = row.origin.machine
    if isinstance(row, StepTime):
        query = queries.step_times().where(
            StepTimeRow.configuration_key == row.configuration_key,
            StepTimeRow.model_key == row.model_key,
            queries.of_machine(StepTimeRow, machine),
            StepTimeRow.created_at_ms.in_(instants),
        )
        return query, step_time_of
    if isinstance(row, UserTiming | UserPromotion):
        return user_kernels.same_key_as(row, instants)
    model, select_rows, build = _READING[type(row)]
    of_key = of_problem(model, row.problem, machine, row.kernel_abi)
    return select_rows().where(*of_key, model.created_at_ms.in_(instants)), build


_READING: dict[
    type[Measurement | Promotion | StorageDuel],
    tuple[queries.Keyed, Callable[[], AnySelect], Callable[[AnyRow], Any]],
] = {
    Measurement: (MeasurementRow, queries.measurements, measurement_of),
    Promotion: (PromotionRow, queries.promotions, promotion_of),
    StorageDuel: (StorageDuelRow, queries.storage_duels, storage_duel_of),
}
"""For rows that are about a problem: their table, the query for them, and what makes a record of one."""


def _content_of(row: Shared) -> Shared:
    """The columns that make two rows the same: everything but whether it is trusted here."""
    return replace(row, origin=replace(row.origin, verified=False))


def _count_by_machine(
    session: Session, model: type[MeasurementRow | ServicePlanRow | StepTimeRow]
) -> dict[tuple[str, str], int]:
    key = (model.core_sig, model.placement_sig)
    return {
        (core, placement): count
        for core, placement, count in session.execute(select(*key, func.count()).group_by(*key))
    }
