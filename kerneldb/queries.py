"""Queries of the store. Rows of a key can be compared; rows of different keys cannot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Delete,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    union,
)
from sqlalchemy.orm import aliased

from phasewise.kerneldb.models import (
    MeasurementRow,
    PlacedColumns,
    PredictorScoreRow,
    ProblemRow,
    PromotionRow,
    ScheduleRow,
    ServicePlanRow,
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


KEYED: dict[str, Any] = {
    "problem": ProblemRow,
    "schedule": ScheduleRow,
    "incumbent": aliased(ScheduleRow),
    "dense_schedule": aliased(ScheduleRow),
}
"""The table that a field with a row of its own is read from."""


def joined(query: AnySelect, model: Any, keyed: Sequence[str]) -> AnySelect:
    """The query of a table's columns, with the rows that its ids name; an incumbent may be none."""
    query = query.select_from(model)
    for name in keyed:
        own = KEYED[name]
        query = query.join(own, getattr(model, f"{name}_id") == own.id, isouter=name == "incumbent")
    return query


def of_best(verified: bool) -> tuple[Any, Any, Any]:
    """A condition on measurements of a key, and their order: the least estimate, and the older of equals."""
    return MeasurementRow.verified == verified, MeasurementRow.estimate_ns, MeasurementRow.id


def promoted_ids(verified: bool, *where: ColumnElement[bool]) -> AnySelect:
    """One measurement a key: the newest of the schedule that was promoted last.

    A promotion that names a schedule without measurements hides no older one. where: conditions on
    promotions, from which the search goes out.
    """
    newest = -MeasurementRow.id  # ordered by the id itself, SQLite reads all timings of a schedule for it
    rank = func.row_number().over(
        partition_by=key_of(PromotionRow), order_by=(PromotionRow.id.desc(), newest)
    )
    ranked = (
        select(MeasurementRow.id, rank.label("rank"))
        .select_from(PromotionRow)
        .join(MeasurementRow, and_(_same_key(), *_same_schedule()))
        .where(PromotionRow.verified == verified, *where)
        .subquery()
    )
    return select(ranked.c.id).where(ranked.c.rank == 1)


def promoted_keys(verified: bool, *where: ColumnElement[bool]) -> AnySelect:
    """Keys of which `promoted_ids` has a measurement. where: conditions on promotions."""
    timed = exists().where(_same_key(), *_same_schedule())
    return select(*key_of(PromotionRow)).where(PromotionRow.verified == verified, timed, *where).distinct()


def _same_schedule() -> tuple[ColumnElement[bool], ...]:
    return (
        MeasurementRow.schedule_id == PromotionRow.schedule_id,
        MeasurementRow.verified == PromotionRow.verified,
    )


def counts_by_key(*where: ColumnElement[bool]) -> AnySelect:
    """The number of measurements of each key, those that are verified and the others; read from an index."""
    columns = (*key_of(MeasurementRow), MeasurementRow.verified)
    return select(*columns, func.count()).where(*where).group_by(*columns)


def counts_by_build() -> AnySelect:
    """The number of measurements of each machine and build, and how many are verified; from an index."""
    columns = (MeasurementRow.core_sig, MeasurementRow.placement_sig, MeasurementRow.kernel_abi)
    verified = func.count().filter(MeasurementRow.verified)
    return select(*columns, func.count(), verified).group_by(*columns)


def keys_by_seeking(core_sig: str | None = None) -> AnySelect:
    """Each key that has measurements, once; then whether one is verified, and whether one is not.

    A seek in the index leads from each value of a column to the next one, so that what it takes goes by keys:
    grouping reads an entry for every measurement. core_sig: of one kind of core.
    """
    keys: Any = None
    for column in key_of(MeasurementRow):
        keys = _next_values(keys, column, core_sig)
    row = aliased(MeasurementRow)
    same = [getattr(row, column.key) == column for column in keys.c]
    kinds = (select(row.id).where(*same, row.verified == state).exists() for state in (True, False))
    return select(*keys.c, *kinds).where(keys.c.problem_id.is_not(None))


def _next_values(keys: Any, column: Any, core_sig: str | None) -> Any:
    """The values of one more column behind each of `keys`, ascending; the last is null."""
    row, name = aliased(MeasurementRow), column.key
    names = [] if keys is None else [column.key for column in keys.c]
    own = () if core_sig is None else (row.core_sig == core_sig,)

    def least(behind: Any, *where: Any) -> Any:
        same = (getattr(row, other) == behind.c[other] for other in names)
        query = select(func.min(getattr(row, name))).where(*same, *own, *where).correlate(behind)
        return query.scalar_subquery().label(name)

    if keys is None:
        first = select(least(None))
    else:
        first = select(*keys.c, least(keys)).where(keys.c[names[-1]].is_not(None))
    values = first.cte(f"each_{name}", recursive=True)
    here = values.c[name]
    beyond = select(*(values.c[other] for other in names), least(values, getattr(row, name) > here))
    return values.union_all(beyond.where(here.is_not(None)))


def of_machine(model: type[PlacedColumns], machine: MachineKey) -> ColumnElement[bool]:
    """Rows of one kind of machine."""
    return and_(model.core_sig == machine.core_sig, model.placement_sig == machine.placement_sig)


def of_problem(
    model: Keyed, problem: Problem, machine: MachineKey, kernel_abi: str
) -> tuple[ColumnElement[bool], ...]:
    """Rows of one key."""
    same = (getattr(ProblemRow, name) == getattr(problem, name) for name in PROBLEM_FIELDS)
    own = select(ProblemRow.id).where(*same).scalar_subquery()
    return (model.problem_id == own, of_machine(model, machine), model.kernel_abi == kernel_abi)


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


def of_losers(keep: int, *where: ColumnElement[bool]) -> AnySelect:
    """Ids of timings of schedules behind the `keep` fastest of their key that no promotion names.

    Beside each, its rank among the rows of the schedule: 1 has the least estimate, the older of equals.
    """
    fastest = func.min(MeasurementRow.estimate_ns)
    of_schedule = (*key_of(MeasurementRow), MeasurementRow.schedule_id)
    place = func.row_number().over(
        partition_by=key_of(MeasurementRow), order_by=(fastest, MeasurementRow.schedule_id)
    )
    ranked = select(*of_schedule, place.label("place")).where(*where).group_by(*of_schedule).subquery()
    columns = [ranked.c[column.key] for column in of_schedule]
    named = or_(
        PromotionRow.schedule_id == MeasurementRow.schedule_id,
        PromotionRow.incumbent_id == MeasurementRow.schedule_id,
    )
    rank = func.row_number().over(
        partition_by=(*of_schedule, MeasurementRow.verified),
        order_by=(MeasurementRow.estimate_ns, MeasurementRow.id),
    )
    return (
        select(MeasurementRow.id, rank)
        .join(ranked, and_(*(a == b for a, b in zip(columns, of_schedule, strict=True))))
        .where(ranked.c.place > keep, ~exists().where(_same_key(), named))
    )


def imported_hints(builds: Collection[str], current_build: str) -> AnySelect:
    """Ids of timings of imported winners of these builds that are hints for another one (`hints`).

    Of a product and a kind of machine the newest one; none where that build has a winner of its own, here or
    imported, or timed the schedule here.
    """
    winner, timed = PromotionRow, aliased(MeasurementRow)
    place = (MeasurementRow.core_sig, MeasurementRow.placement_sig, MeasurementRow.problem_id)

    def of_current(model: Any) -> tuple[ColumnElement[bool], ...]:
        same = (getattr(model, column.key) == column for column in place)
        return (*same, model.kernel_abi == current_build)

    was_timed = (*of_current(timed), timed.verified, timed.schedule_id == MeasurementRow.schedule_id)
    rank = func.row_number().over(
        partition_by=place, order_by=(MeasurementRow.created_at_ms.desc(), MeasurementRow.id.desc())
    )
    ranked = (
        select(MeasurementRow.id, rank.label("rank"))
        .where(
            MeasurementRow.id.in_(promoted_ids(False, PromotionRow.kernel_abi.in_(builds))),
            ~exists().where(*of_current(winner)),
            ~exists().where(*was_timed),
        )
        .subquery()
    )
    return select(ranked.c.id).where(ranked.c.rank == 1)


def without_timing(builds: Collection[str]) -> ColumnElement[bool]:
    """Promotions of these builds whose schedule has no timing of its own trust."""
    return and_(PromotionRow.kernel_abi.in_(builds), ~exists().where(_same_key(), *_same_schedule()))


OLD_BEHIND: dict[Any, tuple[Any, ...]] = {
    row: (*(getattr(row, name) for name in names), row.verified)
    for row, names in (
        (ServicePlanRow, ("model_key", "phase", "core_sig", "placement_sig")),
        (PredictorScoreRow, ("model_name", "reads", "answers_key", "judged_by")),
    )
}
"""Tables of which the newest rows count, and the columns of which each combination has its own newest."""


def old_rows(row: Any, keep: int) -> AnySelect:
    """Ids of a table's rows behind the `keep` newest of their key and trust."""
    rank = func.row_number().over(partition_by=OLD_BEHIND[row], order_by=row.id.desc())
    ranked = select(row.id, rank.label("rank")).subquery()
    return select(ranked.c.id).where(ranked.c.rank > keep)


def delete_unused_problems() -> Delete:
    """Deletes problems that no measurement, promotion or duel is about."""
    naming = (MeasurementRow.problem_id, PromotionRow.problem_id, StorageDuelRow.problem_id)
    return delete(ProblemRow).where(ProblemRow.id.not_in(_named_by(naming)))


def delete_unused_schedules() -> Delete:
    """Deletes schedules that no measurement, promotion or duel names."""
    naming = (
        MeasurementRow.schedule_id,
        PromotionRow.schedule_id,
        PromotionRow.incumbent_id,
        StorageDuelRow.schedule_id,
        StorageDuelRow.dense_schedule_id,
    )
    return delete(ScheduleRow).where(ScheduleRow.id.not_in(_named_by(naming)))


def _named_by(columns: Sequence[Any]) -> Any:
    return union(*(select(column).where(column.is_not(None)) for column in columns))


def key_of(model: Keyed) -> tuple[Any, ...]:
    """The columns that rows must share to be compared, in the order of their index."""
    return (model.core_sig, model.placement_sig, model.kernel_abi, model.problem_id)


def _same_key() -> ColumnElement[bool]:
    keys = zip(key_of(MeasurementRow), key_of(PromotionRow), strict=True)
    return and_(*(mine == theirs for mine, theirs in keys))
