"""The store: opens a database, appends records, returns records. Its callers never see SQL.

Promises that every backend keeps (tests/kerneldb/test_store.py runs them on each):
- Rows are appended, never edited; a call that appends several appends all of them or none.
- Keys are content: the same problem or schedule is one row, whoever writes it first.
- A row that breaks its record's bounds is skipped and reported, and does not hide the good ones.
- Several processes may read and write at once. A `Store` itself belongs to one thread at a time.
- A newer schema is refused before anything is touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import ColumnElement, Engine, Row, Select, and_, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from phasewise.kerneldb import connect
from phasewise.kerneldb.errors import ReadOnlyDatabaseError, RecordError
from phasewise.kerneldb.location import Location, locate
from phasewise.kerneldb.models import (
    Base,
    MeasurementRow,
    ProblemRow,
    PromotionRow,
    ScheduleRow,
    ServicePlanRow,
)
from phasewise.kerneldb.records import (
    Comparison,
    MachineKey,
    Measurement,
    Origin,
    PlanRecord,
    Problem,
    Promotion,
    Sample,
    Schedule,
)
from phasewise.kerneldb.schema import HEAD, SchemaChange, read_revision, upgrade

Report = Callable[[str], None]
T = TypeVar("T")

if TYPE_CHECKING:
    AnyRow: TypeAlias = Row[*tuple[Any, ...]]
    AnySelect: TypeAlias = Select[*tuple[Any, ...]]

PROBLEM_FIELDS = tuple(field.name for field in fields(Problem))
WEIGHT_FIELDS = tuple(name for name in PROBLEM_FIELDS if name != "m")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SignatureCount:
    """What is known about one kind of machine."""

    machine: MachineKey
    measurements: int
    service_plans: int


@dataclass(frozen=True)
class StoreStats:
    """Sizes. `file_bytes` is None where the database is no local file."""

    revision: str
    rows: Mapping[str, int]
    signatures: tuple[SignatureCount, ...]
    file_bytes: int | None


@contextmanager
def open_store(db: str | os.PathLike[str] | None = None, report: Report = _log.warning) -> Iterator[Store]:
    """Open the database that `db` names (see `locate`), creating or upgrading it where needed.

    `report` gets one line for each thing worth a remark: an upgrade, a read-only database, a row skipped.
    Raises KernelDbError, in one clear line, when the database cannot be used.
    """
    location = locate(db)
    writable = True
    if location.file is not None:
        if location.is_absent:
            connect.make_room(location)
        else:
            writable = connect.check_file(location.file)
    engine = connect.engine_for(location, read_only=not writable)
    try:
        yield Store(engine, location, writable, report)
    finally:
        engine.dispose()


class Store:
    """An open database. See the module's promises; made by `open_store`."""

    def __init__(self, engine: Engine, location: Location, writable: bool, report: Report) -> None:
        self.name = location.name
        self.writable = writable
        self._engine = engine
        self._write_engine = connect.for_writing(engine)
        self._file = location.file
        self._report = report
        with connect.clear_errors(self.name):
            self.schema_change = self._prepare()

    def _prepare(self) -> SchemaChange:
        """Check the revision; create or upgrade. Only then are Alembic and the write lock needed."""
        with self._engine.connect() as connection:
            before = read_revision(connection, self.name)
        if not self.writable:
            if before != HEAD:
                state = f"has schema {before}, older than {HEAD}," if before else "is empty"
                raise ReadOnlyDatabaseError(f"database {self.name} {state} and cannot be written")
            self._report(f"database {self.name} is read-only: it is used, and nothing new is kept")
            return SchemaChange(HEAD, HEAD)
        if before == HEAD:
            return SchemaChange(HEAD, HEAD)
        if self._engine.dialect.name == "sqlite" and before is None:
            connect.use_write_ahead_log(self._engine)
        with self._write_engine.begin() as connection:
            change = upgrade(connection, self.name)
        if change.before not in (None, HEAD):
            self._report(f"database {self.name} upgraded from schema {change.before} to {change.after}")
        return change

    def add_measurements(self, measurements: Iterable[Measurement]) -> None:
        """Append all or none."""
        with self._writing() as session:
            for measurement in measurements:
                session.add(
                    MeasurementRow(
                        problem_id=_id_of(session, ProblemRow, asdict(measurement.problem)),
                        schedule_id=_id_of(session, ScheduleRow, asdict(measurement.sample.schedule)),
                        kernel_abi=measurement.kernel_abi,
                        samples_ns=list(measurement.sample.samples_ns),
                        estimate_ns=measurement.sample.estimate_ns,
                        numeric_error=measurement.sample.numeric_error,
                        effort_ns=measurement.sample.effort_ns,
                        conditions=dict(measurement.sample.conditions),
                        **_origin_columns(measurement.origin),
                    )
                )

    def measurements(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> list[Measurement]:
        """Everything measured for a problem on this kind of machine with this build, oldest first."""
        query = _of_problem(_all_measurements(), MeasurementRow, problem, machine, kernel_abi)
        return list(self._records(query.order_by(MeasurementRow.id), _measurement))

    def measurements_of_every_m(
        self, problem: Problem, machine: MachineKey, kernel_abi: str
    ) -> list[Measurement]:
        """As `measurements`, whatever the problem's m is: all that is known about one weight."""
        query = _of_problem(_all_measurements(), MeasurementRow, problem, machine, kernel_abi, WEIGHT_FIELDS)
        return list(self._records(query.order_by(MeasurementRow.id), _measurement))

    def measurement_count(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> int:
        """How many rows `measurements` reads; tells cheaply whether another process has added some."""
        query = select(func.count()).select_from(MeasurementRow).join(ProblemRow)
        counted = _of_problem(query, MeasurementRow, problem, machine, kernel_abi)
        with connect.clear_errors(self.name), Session(self._engine) as session:
            return session.scalar(counted) or 0

    def best_measurement(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> Measurement | None:
        """The verified one with the least estimate, the older of equals; None where nothing was measured."""
        query = _of_problem(_all_measurements(), MeasurementRow, problem, machine, kernel_abi)
        query = query.where(MeasurementRow.verified).order_by(MeasurementRow.estimate_ns, MeasurementRow.id)
        return next(self._records(query, _measurement), None)

    def best_measurements(self) -> list[Measurement]:
        """The best one for each problem, kind of machine and build of the kernel; ordered by problem."""
        rank = func.row_number().over(
            partition_by=_key_of(MeasurementRow), order_by=(MeasurementRow.estimate_ns, MeasurementRow.id)
        )
        ranked = select(MeasurementRow.id, rank.label("rank")).where(MeasurementRow.verified).subquery()
        query = _all_measurements().join(ranked, ranked.c.id == MeasurementRow.id).where(ranked.c.rank == 1)
        return list(self._records(query.order_by(*_PROBLEM_ORDER, MeasurementRow.id), _measurement))

    def add_promotions(self, promotions: Iterable[Promotion]) -> None:
        """Append all or none; from now on each is the newest of its key."""
        with self._writing() as session:
            for promotion in promotions:
                session.add(
                    PromotionRow(
                        problem_id=_id_of(session, ProblemRow, asdict(promotion.problem)),
                        schedule_id=_id_of(session, ScheduleRow, asdict(promotion.schedule)),
                        incumbent_id=promotion.incumbent
                        and _id_of(session, ScheduleRow, asdict(promotion.incumbent)),
                        kernel_abi=promotion.kernel_abi,
                        **asdict(promotion.comparison),
                        **_origin_columns(promotion.origin),
                    )
                )

    def promotions(self, problem: Problem, machine: MachineKey, kernel_abi: str) -> list[Promotion]:
        """Every promotion for a problem on this kind of machine with this build, oldest first."""
        query = _of_problem(_all_promotions(), PromotionRow, problem, machine, kernel_abi)
        return list(self._records(query.order_by(PromotionRow.id), _promotion))

    def promoted_measurement(
        self, problem: Problem, machine: MachineKey, kernel_abi: str
    ) -> Measurement | None:
        """What is in use: the newest verified timing of the schedule that was promoted last.

        None where no schedule was promoted, or none that was timed here.
        """
        query = _of_problem(_promoted_measurements(), MeasurementRow, problem, machine, kernel_abi)
        return next(self._records(query, _measurement), None)

    def promoted_measurements(self, machine: MachineKey | None = None) -> list[Measurement]:
        """What is in use for each problem, build and kind of machine (or this kind); ordered by problem."""
        query = _promoted_measurements().order_by(*_PROBLEM_ORDER, MeasurementRow.id)
        if machine:
            query = query.where(*_of_machine(MeasurementRow, machine))
        return list(self._records(query, _measurement))

    def add_plan(self, plan: PlanRecord) -> None:
        """Append a plan; from now on it is the newest of its key."""
        with self._writing() as session:
            session.add(
                ServicePlanRow(
                    model_key=plan.model_key,
                    phase=plan.phase,
                    plan=plan.plan_json,
                    objectives=dict(plan.objectives),
                    **_origin_columns(plan.origin),
                )
            )

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
        return next(self._records(query, _plan), None)

    def plans(self) -> list[PlanRecord]:
        """Every plan, oldest first."""
        return list(self._records(select(ServicePlanRow).order_by(ServicePlanRow.id), _plan))

    def stats(self) -> StoreStats:
        """Rows by table and by kind of machine."""
        with connect.clear_errors(self.name), Session(self._engine) as session:
            rows = {
                name: session.scalar(select(func.count()).select_from(table)) or 0
                for name, table in sorted(Base.metadata.tables.items())
            }
            measured = _count_by_machine(session, MeasurementRow)
            planned = _count_by_machine(session, ServicePlanRow)
        return StoreStats(HEAD, rows, tuple(self._signatures(measured, planned)), self._file_bytes())

    def _signatures(
        self, measured: Mapping[tuple[str, str], int], planned: Mapping[tuple[str, str], int]
    ) -> Iterator[SignatureCount]:
        for key in sorted({*measured, *planned}, key=repr):
            try:
                yield SignatureCount(MachineKey(*key), measured.get(key, 0), planned.get(key, 0))
            except RecordError as error:
                self._report(f"database {self.name}: rows of one machine are not counted: {error}")

    def _file_bytes(self) -> int | None:
        if self._file is None:
            return None
        log = self._file.with_name(self._file.name + "-wal")
        return self._file.stat().st_size + (log.stat().st_size if log.exists() else 0)

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        if not self.writable:
            raise ReadOnlyDatabaseError(f"database {self.name} is read-only: nothing can be added")
        with connect.clear_errors(self.name), Session(self._write_engine) as session, session.begin():
            yield session

    def _records(self, query: AnySelect, build: Callable[[AnyRow], T]) -> Iterator[T]:
        """The rows that keep their record's bounds; the others are reported. Rows begin with the entity."""
        with connect.clear_errors(self.name), Session(self._engine) as session:
            rows: Sequence[AnyRow] = session.execute(query).all()
        for row in rows:
            try:
                yield build(row)
            except RecordError as error:
                table = row[0].__tablename__
                self._report(f"database {self.name}: row {row[0].id} of {table} is skipped: {error}")


def _all_measurements() -> AnySelect:
    return select(MeasurementRow, ProblemRow, ScheduleRow).join(ProblemRow).join(ScheduleRow)


def _promoted_measurements() -> AnySelect:
    """One measurement a key: a promotion that names a schedule not timed here hides no older one."""
    keys = zip(_key_of(MeasurementRow), _key_of(PromotionRow), strict=True)
    same = (mine == theirs for mine, theirs in keys)
    rank = func.row_number().over(
        partition_by=_key_of(MeasurementRow), order_by=(PromotionRow.id.desc(), MeasurementRow.id.desc())
    )
    ranked = (
        select(MeasurementRow.id, rank.label("rank"))
        .join(PromotionRow, and_(*same, MeasurementRow.schedule_id == PromotionRow.schedule_id))
        .where(MeasurementRow.verified, PromotionRow.verified)
        .subquery()
    )
    return _all_measurements().join(ranked, ranked.c.id == MeasurementRow.id).where(ranked.c.rank == 1)


def _all_promotions() -> AnySelect:
    return (
        select(PromotionRow, ProblemRow, ScheduleRow, _Incumbent)
        .join(ProblemRow)
        .join(ScheduleRow, PromotionRow.schedule_id == ScheduleRow.id)
        .outerjoin(_Incumbent, PromotionRow.incumbent_id == _Incumbent.id)
    )


_Incumbent = aliased(ScheduleRow)
_PROBLEM_ORDER = tuple(getattr(ProblemRow, name) for name in PROBLEM_FIELDS)


def _key_of(model: type[MeasurementRow | PromotionRow]) -> tuple[ColumnElement[Any], ...]:
    """What rows must share to be compared."""
    return (model.problem_id, model.core_sig, model.placement_sig, model.kernel_abi)


def _of_machine(
    model: type[MeasurementRow | PromotionRow], machine: MachineKey
) -> tuple[ColumnElement[bool], ...]:
    return (model.core_sig == machine.core_sig, model.placement_sig == machine.placement_sig)


def _of_problem(
    query: AnySelect,
    model: type[MeasurementRow | PromotionRow],
    problem: Problem,
    machine: MachineKey,
    kernel_abi: str,
    names: Sequence[str] = PROBLEM_FIELDS,
) -> AnySelect:
    return query.where(
        *(getattr(ProblemRow, name) == getattr(problem, name) for name in names),
        *_of_machine(model, machine),
        model.kernel_abi == kernel_abi,
    )


def _id_of(session: Session, model: type[ProblemRow | ScheduleRow], key: dict[str, Any]) -> int:
    """The id of the row with this key, inserted if new; another process may insert it in between."""
    query = select(model.id).filter_by(**key)
    found = session.scalar(query)
    if found is not None:
        return found
    row = model(**key)
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError:
        return session.scalars(query).one()
    return row.id


def _origin_columns(origin: Origin) -> dict[str, Any]:
    return {
        "core_sig": origin.machine.core_sig,
        "placement_sig": origin.machine.placement_sig,
        "program_version": origin.program_version,
        "created_at_ms": origin.created_at_ms,
        "verified": origin.verified,
    }


def _origin(row: MeasurementRow | PromotionRow | ServicePlanRow) -> Origin:
    return Origin(
        MachineKey(row.core_sig, row.placement_sig), row.program_version, row.created_at_ms, row.verified
    )


def _measurement(row: AnyRow) -> Measurement:
    timing, problem, schedule = row
    samples = tuple(timing.samples_ns) if isinstance(timing.samples_ns, list) else ()
    sample = Sample(
        _read(Schedule, schedule),
        samples,
        timing.estimate_ns,
        timing.numeric_error,
        timing.effort_ns,
        timing.conditions,
    )
    return Measurement(_read(Problem, problem), sample, timing.kernel_abi, _origin(timing))


def _promotion(row: AnyRow) -> Promotion:
    promotion, problem, schedule, incumbent = row
    return Promotion(
        _read(Problem, problem),
        _read(Schedule, schedule),
        incumbent and _read(Schedule, incumbent),
        _read(Comparison, promotion),
        promotion.kernel_abi,
        _origin(promotion),
    )


def _read(record: type[T], row: object) -> T:
    """A flat record from the columns that have its fields' names."""
    return record(**{field.name: getattr(row, field.name) for field in fields(cast(Any, record))})


def _plan(row: AnyRow) -> PlanRecord:
    (plan,) = row
    return PlanRecord(plan.model_key, plan.phase, plan.plan, _origin(plan), plan.objectives)


def _count_by_machine(
    session: Session, model: type[MeasurementRow | ServicePlanRow]
) -> dict[tuple[str, str], int]:
    key = (model.core_sig, model.placement_sig)
    return {
        (core, placement): count
        for core, placement, count in session.execute(select(*key, func.count()).group_by(*key))
    }
