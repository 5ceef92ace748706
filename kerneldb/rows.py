"""Between records and rows of the tables. A row that no record can hold raises RecordError."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import (
    Column,
    Insert,
    Row,
    ScalarSelect,
    Table,
    bindparam,
    exists,
    insert,
    select,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from phasewise.kerneldb.models import (
    Base,
    MeasurementRow,
    ProblemRow,
    PromotionRow,
    ScheduleRow,
    ServicePlanRow,
    StepTimeRow,
    StorageDuelRow,
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
    ServedStep,
    StepTime,
    StorageDuel,
)

if TYPE_CHECKING:
    AnyRow: TypeAlias = Row[*tuple[Any, ...]]

T = TypeVar("T")


def add_measurements(session: Session, measurements: Sequence[Measurement]) -> None:
    """Insert them, and their problems and schedules where these are new.

    In few statements that were built before and look ids up themselves: other processes wait for the
    transaction, and most of it would be SQLAlchemy.
    """
    if not measurements:
        return
    _insert_new(session, ProblemRow, [one.problem for one in measurements])
    _insert_new(session, ScheduleRow, [one.sample.schedule for one in measurements])
    rows = [_measurement_columns(one) for one in measurements]
    session.connection().execute(_measurement_insertion(), rows)


def _insert_new(
    session: Session, model: type[ProblemRow | ScheduleRow], records: Iterable[Problem | Schedule]
) -> None:
    """Insert those that have no row."""
    new = [_fields(record) for record in dict.fromkeys(records)]
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
def _measurement_insertion() -> Insert:
    """The parameters of a problem's and a schedule's key begin with the name of their table."""
    ids = {f"{model.__tablename__}_id": _id_by_key(model) for model in (ProblemRow, ScheduleRow)}
    return insert(_table(MeasurementRow)).values(ids)


def _id_by_key(model: type[ProblemRow | ScheduleRow]) -> ScalarSelect[int]:
    prefix = model.__tablename__
    same = (
        column == bindparam(f"{prefix}_{column.name}", type_=column.type) for column in _key_columns(model)
    )
    return select(model.id).where(*same).scalar_subquery()


def _key_columns(model: type[ProblemRow | ScheduleRow]) -> list[Column[Any]]:
    """All but the id."""
    return [column for column in _table(model).columns if not column.primary_key]


def _table(model: type[Base]) -> Table:
    """For statements that are not the unit of work's."""
    return cast(Table, model.__table__)


def _measurement_columns(measurement: Measurement) -> dict[str, Any]:
    problem, sample = measurement.problem, measurement.sample
    return {
        **{f"problem_{name}": value for name, value in _fields(problem).items()},
        **{f"schedule_{name}": value for name, value in _fields(sample.schedule).items()},
        "kernel_abi": measurement.kernel_abi,
        "samples_ns": sample.samples_ns,
        "estimate_ns": sample.estimate_ns,
        "numeric_error": sample.numeric_error,
        "effort_ns": sample.effort_ns,
        "conditions": dict(sample.conditions),
        **_origin_columns(measurement.origin),
    }


def _fields(record: Problem | Schedule) -> dict[str, Any]:
    """As `asdict`, which would copy each value deeply."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def promotion_row(session: Session, promotion: Promotion) -> PromotionRow:
    """A new row; its problem and its schedules are inserted if they are new."""
    return PromotionRow(
        problem_id=id_of(session, ProblemRow, promotion.problem),
        schedule_id=id_of(session, ScheduleRow, promotion.schedule),
        incumbent_id=promotion.incumbent and id_of(session, ScheduleRow, promotion.incumbent),
        kernel_abi=promotion.kernel_abi,
        **asdict(promotion.comparison),
        **_origin_columns(promotion.origin),
    )


def storage_duel_row(session: Session, duel: StorageDuel) -> StorageDuelRow:
    """A new row; its problem and its schedules are inserted if they are new."""
    return StorageDuelRow(
        problem_id=id_of(session, ProblemRow, duel.problem),
        schedule_id=id_of(session, ScheduleRow, duel.schedule),
        dense_schedule_id=id_of(session, ScheduleRow, duel.dense_schedule),
        kernel_abi=duel.kernel_abi,
        **asdict(duel.comparison),
        **_origin_columns(duel.origin),
    )


def plan_row(plan: PlanRecord) -> ServicePlanRow:
    """A new row."""
    return ServicePlanRow(
        model_key=plan.model_key,
        phase=plan.phase,
        plan=plan.plan_json,
        objectives=dict(plan.objectives),
        **_origin_columns(plan.origin),
    )


def step_time_row(timing: StepTime) -> StepTimeRow:
    """A new row."""
    return StepTimeRow(
        model_key=timing.model_key,
        configuration_key=timing.configuration_key,
        plan=timing.plan_json,
        kernels=timing.kernels,
        kernel_abi=timing.kernel_abi,
        samples_ns=list(timing.samples_ns),
        estimate_ns=timing.estimate_ns,
        conditions=dict(timing.conditions),
        **asdict(timing.step),
        **_origin_columns(timing.origin),
    )


def id_of(session: Session, model: type[ProblemRow | ScheduleRow], record: Problem | Schedule) -> int:
    """The id of the record's row, inserted if new. A session is one transaction, and asks once for each."""
    ids: dict[Problem | Schedule, int] = session.info.setdefault("ids", {})
    if record not in ids:
        ids[record] = _find_or_insert(session, model, _fields(record))
    return ids[record]


def _find_or_insert(session: Session, model: type[ProblemRow | ScheduleRow], key: dict[str, Any]) -> int:
    """Another process may insert it between the look and the insertion."""
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


def measurement_of(row: AnyRow) -> Measurement:
    """The record of a row of `queries.measurements`."""
    timing, problem, schedule = row
    sample = Sample(
        _read(Schedule, schedule),
        _samples(timing.samples_ns),
        timing.estimate_ns,
        timing.numeric_error,
        timing.effort_ns,
        timing.conditions,
    )
    return Measurement(_read(Problem, problem), sample, timing.kernel_abi, _origin(timing))


def promotion_of(row: AnyRow) -> Promotion:
    """The record of a row of `queries.promotions`."""
    promotion, problem, schedule, incumbent = row
    return Promotion(
        _read(Problem, problem),
        _read(Schedule, schedule),
        incumbent and _read(Schedule, incumbent),
        _read(Comparison, promotion),
        promotion.kernel_abi,
        _origin(promotion),
    )


def storage_duel_of(row: AnyRow) -> StorageDuel:
    """The record of a row of `queries.storage_duels`."""
    duel, problem, schedule, dense = row
    return StorageDuel(
        _read(Problem, problem),
        _read(Schedule, schedule),
        _read(Schedule, dense),
        _read(Comparison, duel),
        duel.kernel_abi,
        _origin(duel),
    )


def plan_of(row: AnyRow) -> PlanRecord:
    """The record of a row of the service plans."""
    (plan,) = row
    return PlanRecord(plan.model_key, plan.phase, plan.plan, _origin(plan), plan.objectives)


def step_time_of(row: AnyRow) -> StepTime:
    """The record of a row of the step times."""
    (timing,) = row
    return StepTime(
        timing.model_key,
        timing.configuration_key,
        timing.plan,
        timing.kernels,
        _read(ServedStep, timing),
        _samples(timing.samples_ns),
        timing.estimate_ns,
        timing.kernel_abi,
        _origin(timing),
        timing.conditions,
    )


def _samples(stored: object) -> tuple[Any, ...]:
    return tuple(stored) if isinstance(stored, list) else ()


def _read(record: type[T], row: object) -> T:
    """A flat record from the columns that have its fields' names."""
    return record(**{field.name: getattr(row, field.name) for field in fields(cast(Any, record))})


def _origin_columns(origin: Origin) -> dict[str, Any]:
    return {
        "core_sig": origin.machine.core_sig,
        "placement_sig": origin.machine.placement_sig,
        "program_version": origin.program_version,
        "created_at_ms": origin.created_at_ms,
        "verified": origin.verified,
    }


def _origin(row: MeasurementRow | PromotionRow | StorageDuelRow | ServicePlanRow | StepTimeRow) -> Origin:
    return Origin(
        MachineKey(row.core_sig, row.placement_sig), row.program_version, row.created_at_ms, row.verified
    )
