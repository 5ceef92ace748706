"""Between records and rows of the tables. A row that no record can hold raises RecordError."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import Row, Select, bindparam, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from phasewise.kerneldb.models import (
    MeasurementRow,
    ProblemRow,
    PromotionRow,
    ScheduleRow,
    ServicePlanRow,
    StepTimeRow,
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
)

if TYPE_CHECKING:
    AnyRow: TypeAlias = Row[*tuple[Any, ...]]

T = TypeVar("T")

KEYS_AT_ONCE = 500
"""Of a query: databases bound how many values one may have."""


def measurement_row(session: Session, measurement: Measurement) -> MeasurementRow:
    """A new row; its problem and its schedule are inserted if they are new."""
    sample = measurement.sample
    return MeasurementRow(
        problem_id=id_of(session, ProblemRow, measurement.problem),
        schedule_id=id_of(session, ScheduleRow, sample.schedule),
        kernel_abi=measurement.kernel_abi,
        samples_ns=list(sample.samples_ns),
        estimate_ns=sample.estimate_ns,
        numeric_error=sample.numeric_error,
        effort_ns=sample.effort_ns,
        conditions=dict(sample.conditions),
        **_origin_columns(measurement.origin),
    )


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


def learn_ids(
    session: Session, model: type[ProblemRow | ScheduleRow], records: Iterable[Problem | Schedule]
) -> None:
    """Look up the ids of many records' rows at once, for `id_of`; the rows are inserted if they are new."""
    ids = _ids(session)
    new = [record for record in dict.fromkeys(records) if record not in ids]
    if not new:
        return
    ids |= _stored_ids(session, model, new)
    missing = [record for record in new if record not in ids]
    if not missing:
        return
    rows = [model(**asdict(record)) for record in missing]
    try:
        with session.begin_nested():
            session.add_all(rows)
    except IntegrityError:  # another process was quicker with one of them
        ids |= {record: _find_or_insert(session, model, asdict(record)) for record in missing}
    else:
        ids |= {record: row.id for record, row in zip(missing, rows, strict=True)}


def id_of(session: Session, model: type[ProblemRow | ScheduleRow], record: Problem | Schedule) -> int:
    """The id of the record's row, inserted if new. A session is one transaction, and asks once for each."""
    learn_ids(session, model, [record])
    return _ids(session)[record]


def _ids(session: Session) -> dict[Problem | Schedule, int]:
    known: dict[Problem | Schedule, int] = session.info.setdefault("ids", {})
    return known


def _stored_ids(
    session: Session, model: type[ProblemRow | ScheduleRow], records: Sequence[Problem | Schedule]
) -> dict[Problem | Schedule, int]:
    """Of those that have a row."""
    names = tuple(field.name for field in fields(records[0]))
    by_key = {tuple(getattr(record, name) for name in names): record for record in records}
    keys, query, found = [*by_key], _ids_by_key(model, names), {}
    for at in range(0, len(keys), KEYS_AT_ONCE):
        rows = session.execute(query, {"keys": keys[at : at + KEYS_AT_ONCE]})
        found.update({by_key[tuple(key)]: row_id for row_id, *key in rows})
    return found


@cache
def _ids_by_key(model: type[ProblemRow | ScheduleRow], names: tuple[str, ...]) -> Select[Any]:
    """Built once: SQLAlchemy takes longer for that than SQLite for the answer."""
    columns = [getattr(model, name) for name in names]
    return select(model.id, *columns).where(tuple_(*columns).in_(bindparam("keys", expanding=True)))


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


def _origin(row: MeasurementRow | PromotionRow | ServicePlanRow | StepTimeRow) -> Origin:
    return Origin(
        MachineKey(row.core_sig, row.placement_sig), row.program_version, row.created_at_ms, row.verified
    )
