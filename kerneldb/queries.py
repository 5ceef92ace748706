"""Queries of the store. Rows of a key can be compared; rows of different keys cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import JSON, ColumnElement, Delete, Select, and_, delete, exists, func, or_, select, union

from phasewise.kerneldb.fields import flat_parts, flattened, parts
from phasewise.kerneldb.records import MachineKey, Measurement, Problem, StoredRow
from phasewise.kerneldb.tables import MEASUREMENT, PROBLEM, PROMOTION, TABLES

if TYPE_CHECKING:
    AnySelect: TypeAlias = Select[*tuple[Any, ...]]
    Condition: TypeAlias = tuple[ColumnElement[bool], ...]

T = TypeVar("T")

BUILD_FIELDS = ("core_sig", "placement_sig", "kernel_abi")
KEY_FIELDS = (*BUILD_FIELDS, "problem_id")


def batched(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Split items into runs of `count`, the last run perhaps shorter."""
    for first in range(0, len(items), count):
        yield items[first : first + count]


def of(kind: type[StoredRow], **equal: object) -> Condition:
    """The condition of rows of a kind whose fields have these values; a record stands for its flat fields."""
    columns, conditions = TABLES[kind].c, list[ColumnElement[bool]]()
    for name, value in equal.items():
        if isinstance(value, Problem):
            conditions.append(columns.problem_id == _problem_ids(value).scalar_subquery())
        elif is_dataclass(value):
            conditions += of(kind, **flattened(value))
        elif name in columns and not isinstance(columns[name].type, JSON):
            conditions.append(columns[name] == value)
    return tuple(conditions)


def of_same_key(row: StoredRow) -> Condition:
    """The condition of rows with the same subject, kind of machine and kernel build as `row`."""
    named = {name: getattr(row, name) for name in row.kind.named_by}
    return of(type(row), **named, machine=row.origin.machine, kernel_abi=row.build)


def naming_columns(kind: Any) -> list[str]:
    """The columns that name the subject of a kind's rows, the most general first."""
    named = [part for part in parts(kind) if part.name in kind.kind.named_by]
    named.sort(key=lambda part: kind.kind.named_by.index(part.name))
    return [own.name for part in named for own in ((part,) if part.is_flat else flat_parts(part.record))]


def of_weight(problem: Problem, machine: MachineKey, kernel_abi: str) -> Condition:
    """The condition of measurements whose keys differ from these in m only."""
    of_weight = MEASUREMENT.c.problem_id.in_(_problem_ids(problem, but="m"))
    return (of_weight, *of(Measurement, machine=machine, kernel_abi=kernel_abi))


def _problem_ids(problem: Problem, but: str = "") -> AnySelect:
    same = (PROBLEM.c[name] == value for name, value in flattened(problem).items() if name != but)
    return select(PROBLEM.c.id).where(*same)


def key_of(table: Any) -> tuple[Any, ...]:
    """The columns that rows must share to be compared, in the order of their index."""
    return tuple(table.c[name] for name in KEY_FIELDS)


def _same_key() -> ColumnElement[bool]:
    keys = zip(key_of(MEASUREMENT), key_of(PROMOTION), strict=True)
    return and_(*(mine == theirs for mine, theirs in keys))


def _same_schedule() -> Condition:
    return (
        MEASUREMENT.c.schedule_id == PROMOTION.c.schedule_id,
        MEASUREMENT.c.verified == PROMOTION.c.verified,
    )


# ---- what is in use ---------------------------------------------------------------------------------------


def promoted_ids(verified: bool, *where: ColumnElement[bool]) -> AnySelect:
    """Select one measurement id of each key: the newest of the schedule that was promoted last. A promotion
    that names a schedule without measurements hides no older promotion. where: conditions on promotions, at
    which the search starts."""
    newest = -MEASUREMENT.c.id  # ordered by the id itself, SQLite reads all timings of a schedule for it
    rank = func.row_number().over(partition_by=key_of(PROMOTION), order_by=(PROMOTION.c.id.desc(), newest))
    ranked = (
        select(MEASUREMENT.c.id, rank.label("rank"))
        .select_from(PROMOTION.join(MEASUREMENT, and_(_same_key(), *_same_schedule())))
        .where(PROMOTION.c.verified == verified, *where)
        .subquery()
    )
    return select(ranked.c.id).where(ranked.c.rank == 1)


def promoted_keys(verified: bool, *where: ColumnElement[bool]) -> AnySelect:
    """Select the keys that have a measurement in `promoted_ids`. where: conditions on promotions."""
    timed = exists().where(_same_key(), *_same_schedule())
    return select(*key_of(PROMOTION)).where(PROMOTION.c.verified == verified, timed, *where).distinct()


# ---- counts -----------------------------------------------------------------------------------------------


def counts_by_key(*where: ColumnElement[bool]) -> AnySelect:
    """Count the measurements of each key, verified and imported ones apart; reads an index."""
    columns = (*key_of(MEASUREMENT), MEASUREMENT.c.verified)
    return select(*columns, func.count()).where(*where).group_by(*columns)


def counts_by_build() -> AnySelect:
    """Count the measurements of each machine and build, in all and verified; reads an index."""
    columns = [MEASUREMENT.c[name] for name in BUILD_FIELDS]
    verified = func.count().filter(MEASUREMENT.c.verified)
    return select(*columns, func.count(), verified).group_by(*columns)


# ---- clean-up ---------------------------------------------------------------------------------------------


def of_losers(keep: int, *where: ColumnElement[bool]) -> AnySelect:
    """Select the ids of timings of schedules that are behind the `keep` fastest of their key and that no
    promotion names. Beside each id: its rank among the schedule's rows, 1 for the least estimate, the older
    of equals."""
    row = MEASUREMENT.c
    of_schedule = (*key_of(MEASUREMENT), row.schedule_id)
    place = func.row_number().over(
        partition_by=key_of(MEASUREMENT), order_by=(func.min(row.estimate_ns), row.schedule_id)
    )
    ranked = select(*of_schedule, place.label("place")).where(*where).group_by(*of_schedule).subquery()
    columns = [ranked.c[column.key] for column in of_schedule]
    named = or_(PROMOTION.c.schedule_id == row.schedule_id, PROMOTION.c.incumbent_id == row.schedule_id)
    rank = func.row_number().over(
        partition_by=(*of_schedule, row.verified), order_by=(row.estimate_ns, row.id)
    )
    return (
        select(row.id, rank)
        .join(ranked, and_(*(a == b for a, b in zip(columns, of_schedule, strict=True))))
        .where(ranked.c.place > keep, ~exists().where(_same_key(), named))
    )


def old_rows(kind: type[StoredRow], keep: int) -> AnySelect:
    """Select the ids of rows behind the `keep` newest of equal `RowKind.newest_of` fields and `verified`."""
    columns = TABLES[kind].c
    key = [columns[name] for name in (*kind.kind.newest_of, "verified")]
    rank = func.row_number().over(partition_by=key, order_by=columns.id.desc())
    ranked = select(columns.id, rank.label("rank")).subquery()
    return select(ranked.c.id).where(ranked.c.rank > keep)


def delete_unnamed(kind: type) -> Delete:
    """Delete the problems, or the schedules, that no row names."""
    own = TABLES[kind]
    naming = [
        column
        for table in TABLES.values()
        for column in table.c
        if any(key.column.table is own for key in column.foreign_keys)
    ]
    named: Any = union(*(select(column).where(column.is_not(None)) for column in naming))
    return delete(own).where(own.c.id.not_in(named))
