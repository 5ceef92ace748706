"""The rows of a file, or of another database, that a database does not have yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy.orm import Session

from phasewise.kerneldb import queries
from phasewise.kerneldb.models import ServicePlanRow, StepTimeRow
from phasewise.kerneldb.queries import of_problem
from phasewise.kerneldb.records import PlanRecord, StepTime
from phasewise.kerneldb.rows import KEPT, Shared, rows_of
from phasewise.kerneldb.user_kernels import UserPromotion, UserTiming

if TYPE_CHECKING:
    from phasewise.kerneldb.queries import AnySelect
    from phasewise.kerneldb.rows import AnyRow

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
            if _content_of(row) not in stored_contents:
                stored_contents.add(_content_of(row))
                yield row


def _key_of(row: Shared) -> tuple[object, ...]:
    if isinstance(row, PlanRecord):
        return (PlanRecord.__name__, row.model_key, row.phase, row.origin.machine)
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
        case UserTiming() | UserPromotion():
            model = kept.model
            return query.where(model.core_sig == machine.core_sig, model.kernel_abi == row.kernel_abi)
        case _:
            return query.where(*of_problem(kept.model, row.problem, machine, row.kernel_abi))


def _content_of(row: Shared) -> Shared:
    """The columns that make two rows the same: everything but whether it is trusted here."""
    return replace(row, origin=replace(row.origin, verified=False)) if row.origin.verified else row
