"""The rows of a table key by key, in one order whatever the database: what an export streams.

Timings, promotions and duels of one problem on one kind of machine with one build are a group; so are plans
of one phase of a model, step times of one configuration of it, scores by the same answers, and what is known
of one build of a user's kernel. A reader keeps one group in memory, which is what one machine learnt about
one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from phasewise.kerneldb import counts, queries
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.records import MachineKey
from phasewise.kerneldb.rows import KEPT

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    Condition = tuple[ColumnElement[bool], ...]

GROUPED_BY = {
    "PlanRecord": ("model_key", "phase"),
    "StepTime": ("model_key", "configuration_key"),
    "PredictorScore": ("model_name", "answers_key"),
    "UserTiming": ("name", "kernel_abi"),
    "UserPromotion": ("name", "kernel_abi"),
}
"""Columns that the rows of a group share, by the name of the record: those that a file is sorted by first.
Any other record has a problem, a machine and a build.
"""


def conditions(
    session: Session, record: type, wanted: Callable[[MachineKey], bool], report: counts.Report
) -> Iterator[Condition]:
    """The condition of the rows of each group, in the order of groups. All of them are known at once."""
    model = KEPT[record].model
    if record.__name__ in GROUPED_BY:
        columns = [getattr(model, name) for name in GROUPED_BY[record.__name__]]
        keys = sorted(tuple(row) for row in session.execute(select(*columns).distinct()))
    else:
        columns = [*queries.key_of(model)]
        problem_keys = _problem_keys(session, columns, wanted, report)
        keys = [values for _, values in sorted(problem_keys, key=lambda key: key[0])]
    return (tuple(a == b for a, b in zip(columns, values, strict=True)) for values in keys)


def _problem_keys(
    session: Session, columns: list[Any], wanted: Callable[[MachineKey], bool], report: counts.Report
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """The place of each group, and the values of the columns that its rows share."""
    problems = counts.problems_by_id(session)
    places = {
        number: problem if isinstance(problem, RecordError) else astuple(problem)
        for number, problem in problems.items()
    }
    groups: Any = session.execute(select(*columns).distinct())
    for values in groups:
        core, placement, abi, problem_id = values
        place = places[problem_id]
        try:
            machine = MachineKey(core, placement)
            if isinstance(place, RecordError):
                raise place
        except RecordError as error:
            report(f"rows of one problem are left out: {error}")
            continue
        if wanted(machine):
            yield (*place, core, placement, abi), tuple(values)
