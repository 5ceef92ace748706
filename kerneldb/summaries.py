"""Summaries of raw samples: what stays of the timings of schedules that lost.

Of each key (problem, kind of machine, build) the fastest schedules and all that promotions name keep every
raw sample. Of any other schedule one row is left, its least estimate, with five samples in place of all: the
least, the quartiles and the largest. So a search still knows what it tried and how fast that was. Nothing is
edited: a row is deleted and another of the same number takes its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, delete, insert, select

from phasewise.kerneldb import queries
from phasewise.kerneldb.tables import MEASUREMENT

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

KEPT_SAMPLES = 5

KEEP_SCHEDULES = 16
"""Fastest schedules of a problem that keep their raw samples when tuning tidies up by itself."""

TIDY_ABOVE_ROWS = 100_000
"""Measurements of one kind of machine above which tuning tidies up: some 100 MB."""

ROWS_AT_ONCE = 500
"""Rows changed in one transaction, so that other writers need not wait long."""


@dataclass
class Losers:
    """Ids of timings of schedules that lost."""

    best: array[int] = field(default_factory=lambda: array("q"))
    """The id of the fastest timing of each schedule, which stays with its samples summarised."""
    others: array[int] = field(default_factory=lambda: array("q"))
    """Ids of all other timings, which are deleted."""


@dataclass(frozen=True)
class Summarised:
    """The number of rows that were deleted, and of rows whose samples were summarised."""

    deleted: int
    summarised: int


def summary_of(samples_ns: Sequence[int]) -> list[int]:
    """The least, the quartiles and the largest of samples; all, in their order, where samples are few."""
    if len(samples_ns) <= KEPT_SAMPLES:
        return list(samples_ns)
    ascending = sorted(samples_ns)
    steps = KEPT_SAMPLES - 1
    return [ascending[(len(ascending) - 1) * step // steps] for step in range(KEPT_SAMPLES)]


def losers(connection: Connection, keep: int, *where: ColumnElement[bool]) -> Losers:
    """Find the rows behind the `keep` fastest schedules of each key; eight bytes of memory for each row."""
    losing = Losers()
    query = queries.of_losers(keep, *where).execution_options(yield_per=10_000)
    for number, rank in connection.execute(query):
        (losing.best if rank == 1 else losing.others).append(number)
    return losing


def summarise(connection: Connection, numbers: Sequence[int], *, dry_run: bool) -> int:
    """Summarise the samples of rows with these ids; return how many had more samples than are kept."""
    table = MEASUREMENT
    query = select(table).where(table.c.id.in_(numbers))
    rows: list[dict[str, Any]] = [dict(row) for row in connection.execute(query).mappings()]
    long = [
        row for row in rows if isinstance(row["samples_ns"], list) and len(row["samples_ns"]) > KEPT_SAMPLES
    ]
    if dry_run or not long:
        return len(long)
    connection.execute(delete(table).where(table.c.id.in_([row["id"] for row in long])))
    connection.execute(insert(table), [row | {"samples_ns": summary_of(row["samples_ns"])} for row in long])
    return len(long)
