"""Queries of the store. Rows of a key can be compared; rows of different keys cannot."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Delete,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.orm import aliased

from phasewise.kerneldb.models import (
    MeasurementRow,
    PlacedColumns,
    ProblemRow,
    PromotionRow,
    ScheduleRow,
    StepTimeRow,
    StorageDuelRow,
)
from phasewise.kerneldb.records import MachineKey, Problem

if TYPE_CHECKING:
    AnySelect: TypeAlias = Select[*tuple[Any, ...]]
    Keyed: TypeAlias = type[MeasurementRow | PromotionRow | StorageDuelRow]

PROBLEM_FIELDS = tuple(field.name for field in fields(Problem))
WEIGHT_FIELDS = tuple(name for name in PROBLEM_FIELDS if name != "m")
BUILD_FIELDS = ("core_sig", "placement_sig", "kernel_abi")
PROBLEM_ORDER = tuple(getattr(ProblemRow, name) for name in PROBLEM_FIELDS)

_Incumbent = aliased(ScheduleRow)
_Dense = aliased(ScheduleRow)


def measurements() -> AnySelect:
    """Every measurement, with its problem and its schedule."""
    return select(MeasurementRow, ProblemRow, ScheduleRow).join(ProblemRow).join(ScheduleRow)


def promotions() -> AnySelect:
    """Every promotion, with its problem, its schedule and the incumbent's, if that is a row."""
    return (
        select(PromotionRow, ProblemRow, ScheduleRow, _Incumbent)
        .join(ProblemRow)
        .join(ScheduleRow, PromotionRow.schedule_id == ScheduleRow.id)
        .outerjoin(_Incumbent, PromotionRow.incumbent_id == _Incumbent.id)
    )


def storage_duels() -> AnySelect:
    """Every duel between storages, with its problem and the schedules of sparse and dense."""
    return (
        select(StorageDuelRow, ProblemRow, ScheduleRow, _Dense)
        .join(ProblemRow)
        .join(ScheduleRow, StorageDuelRow.schedule_id == ScheduleRow.id)
        .join(_Dense, StorageDuelRow.dense_schedule_id == _Dense.id)
    )


def best_measurements(verified: bool) -> AnySelect:
    """One measurement a key: the least estimate, and the older of equals."""
    rank = func.row_number().over(
        partition_by=_key_of(MeasurementRow), order_by=(MeasurementRow.estimate_ns, MeasurementRow.id)
    )
    ranked = select(MeasurementRow.id, rank.label("rank")).where(MeasurementRow.verified == verified)
    return _first_of(ranked)


def promoted_measurements(verified: bool) -> AnySelect:
    """One measurement a key: the newest of the schedule that was promoted last.

    A promotion that names a schedule without measurements hides no older one.
    """
    rank = func.row_number().over(
        partition_by=_key_of(MeasurementRow), order_by=(PromotionRow.id.desc(), MeasurementRow.id.desc())
    )
    ranked = (
        select(MeasurementRow.id, rank.label("rank"))
        .join(PromotionRow, and_(_same_key(), MeasurementRow.schedule_id == PromotionRow.schedule_id))
        .where(MeasurementRow.verified == verified, PromotionRow.verified == verified)
    )
    return _first_of(ranked)


def _first_of(ranked: AnySelect) -> AnySelect:
    inner = ranked.subquery()
    return measurements().join(inner, inner.c.id == MeasurementRow.id).where(inner.c.rank == 1)


def of_machine(model: type[PlacedColumns], machine: MachineKey) -> ColumnElement[bool]:
    """Rows of one kind of machine."""
    return and_(model.core_sig == machine.core_sig, model.placement_sig == machine.placement_sig)


def of_problem(
    model: Keyed, problem: Problem, machine: MachineKey, kernel_abi: str
) -> tuple[ColumnElement[bool], ...]:
    """Rows of one key."""
    same = (getattr(ProblemRow, name) == getattr(problem, name) for name in PROBLEM_FIELDS)
    return (*same, of_machine(model, machine), model.kernel_abi == kernel_abi)


@cache
def measurement_count() -> AnySelect:
    """The number of measurements of the key that `key_parameters` names.

    Built once: a run asks before every batch, and building takes several times as long as the answer.
    """
    same = [getattr(ProblemRow, name) == bindparam(name) for name in PROBLEM_FIELDS]
    same += [getattr(MeasurementRow, name) == bindparam(name) for name in BUILD_FIELDS]
    return select(func.count()).select_from(MeasurementRow).join(ProblemRow).where(*same)


def key_parameters(problem: Problem, machine: MachineKey, kernel_abi: str) -> dict[str, Any]:
    """The bound parameters of one key, for a query that was built before."""
    of_build = (machine.core_sig, machine.placement_sig, kernel_abi)
    return asdict(problem) | dict(zip(BUILD_FIELDS, of_build, strict=True))


def of_weight(
    model: Keyed, problem: Problem, machine: MachineKey, kernel_abi: str
) -> tuple[ColumnElement[bool], ...]:
    """Rows of the keys that differ in m only."""
    same = (getattr(ProblemRow, name) == getattr(problem, name) for name in WEIGHT_FIELDS)
    return (*same, of_machine(model, machine), model.kernel_abi == kernel_abi)


def count_by_build() -> AnySelect:
    """The name of each build, its measurements, how many of them are verified; those of step times too."""
    timed = select(MeasurementRow.kernel_abi, literal(1).label("one"), MeasurementRow.verified)
    stepped = select(StepTimeRow.kernel_abi, literal(0), false()).distinct()
    rows = union_all(timed, stepped).subquery()
    verified = func.sum(case((rows.c.verified, 1), else_=0))
    return (
        select(rows.c.kernel_abi, func.sum(rows.c.one), verified)
        .group_by(rows.c.kernel_abi)
        .order_by(rows.c.kernel_abi)
    )


def delete_dominated(keep: int) -> Delete:
    """Deletes measurements of schedules behind the `keep` fastest of their key that no promotion names."""
    fastest = func.min(MeasurementRow.estimate_ns)
    of_schedule = (*_key_of(MeasurementRow), MeasurementRow.schedule_id)
    rank = func.row_number().over(
        partition_by=_key_of(MeasurementRow), order_by=(fastest, MeasurementRow.schedule_id)
    )
    ranked = select(*of_schedule, rank.label("rank")).group_by(*of_schedule).subquery()
    columns = [ranked.c[column.key] for column in of_schedule]
    named = or_(
        PromotionRow.schedule_id == MeasurementRow.schedule_id,
        PromotionRow.incumbent_id == MeasurementRow.schedule_id,
    )
    behind = (
        select(MeasurementRow.id)
        .join(ranked, and_(*(a == b for a, b in zip(columns, of_schedule, strict=True))))
        .where(ranked.c.rank > keep, ~exists().where(_same_key(), named))
    )
    return delete(MeasurementRow).where(MeasurementRow.id.in_(behind))


def delete_unused_problems() -> Delete:
    """Deletes problems that no measurement, promotion or duel is about."""
    naming: tuple[Keyed, ...] = (MeasurementRow, PromotionRow, StorageDuelRow)
    used = [exists().where(model.problem_id == ProblemRow.id) for model in naming]
    return delete(ProblemRow).where(~or_(*used))


def delete_unused_schedules() -> Delete:
    """Deletes schedules that no measurement, promotion or duel names."""
    naming = (
        MeasurementRow.schedule_id,
        PromotionRow.schedule_id,
        PromotionRow.incumbent_id,
        StorageDuelRow.schedule_id,
        StorageDuelRow.dense_schedule_id,
    )
    return delete(ScheduleRow).where(~or_(*(exists().where(column == ScheduleRow.id) for column in naming)))


def _key_of(model: Keyed) -> tuple[Any, ...]:
    """The columns that rows must share to be compared."""
    return (model.problem_id, model.core_sig, model.placement_sig, model.kernel_abi)


def _same_key() -> ColumnElement[bool]:
    keys = zip(_key_of(MeasurementRow), _key_of(PromotionRow), strict=True)
    return and_(*(mine == theirs for mine, theirs in keys))
