"""Numbers of rows: by table, by kind of machine, by build, by program; read from indexes, not from rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, func, select

from phasewise.kerneldb import queries
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.fields import made
from phasewise.kerneldb.records import (
    KINDS,
    SINGLE_CORE,
    MachineKey,
    Measurement,
    PlanRecord,
    Problem,
    StepTime,
    StoredRow,
)
from phasewise.kerneldb.tables import METADATA, PROBLEM, TABLES

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

Report = Callable[[str], None]


@dataclass(frozen=True)
class Key:
    """The columns that timings must share to be compared."""

    problem: Problem
    machine: MachineKey
    kernel_abi: str


@dataclass(frozen=True)
class KeyCount:
    """The numbers of measurements of one key: made here, and imported."""

    key: Key
    verified: int = 0
    imported: int = 0

    @property
    def total(self) -> int:
        return self.verified + self.imported


@dataclass(frozen=True)
class SignatureCount:
    """The number of rows of one kind of machine, by table."""

    machine: MachineKey
    measurements: int
    service_plans: int
    step_times: int


@dataclass(frozen=True)
class BuildCount:
    """The number of measurements of one build of a kernel family."""

    kernel_abi: str
    measurements: int
    unverified: int
    """Measurements that were imported and not measured here."""


@dataclass(frozen=True)
class StoreStats:
    """The size of a database: rows by table, kind of machine and build. `file_bytes` is None where the
    database is no local file."""

    revision: str
    rows: Mapping[str, int]
    signatures: tuple[SignatureCount, ...]
    builds: tuple[BuildCount, ...]
    file_bytes: int | None


def problems_by_id(connection: Connection) -> dict[int, Problem | RecordError]:
    """Every problem by its id; in place of a problem that breaks its bounds, the reason."""
    return {number: made(Problem, *values) for number, *values in connection.execute(select(PROBLEM))}


def count_by_key(connection: Connection, report: Report, *where: ColumnElement[bool]) -> Iterator[KeyCount]:
    """Yield the count of every key that has measurements, ordered by machine; a key that breaks its bounds is
    reported and left out."""
    counts_by_key: dict[tuple[Any, ...], Counter[bool]] = {}
    for *columns, verified, count in connection.execute(queries.counts_by_key(*where)):
        counts_by_key.setdefault(tuple(columns), Counter())[bool(verified)] += count
    made_keys = _keys(connection, report)
    for key_columns, counts in counts_by_key.items():
        key = made_keys(key_columns)
        if key is not None:
            yield KeyCount(key, counts[True], counts[False])


def promoted_keys(connection: Connection, verified: bool, *where: ColumnElement[bool]) -> set[Key]:
    """The keys with a schedule in use here (`verified`), or in the database that they were imported from.
    where: conditions on promotions."""
    made_keys = _keys(connection, lambda _: None)
    keys = (made_keys(tuple(row)) for row in connection.execute(queries.promoted_keys(verified, *where)))
    return {key for key in keys if key is not None}


def _keys(connection: Connection, report: Report) -> Callable[[tuple[Any, ...]], Key | None]:
    """Make a function from a row's columns to its key; a key out of bounds is reported and becomes None."""
    problems = problems_by_id(connection)

    def made_key(columns: tuple[Any, ...]) -> Key | None:
        core, placement, abi, problem_id = columns
        machine, problem = made(MachineKey, core, placement), problems.get(problem_id)
        if isinstance(machine, MachineKey) and isinstance(problem, Problem):
            return Key(problem, machine, abi)
        broken = problem if isinstance(machine, MachineKey) else machine
        report(f"timings of one problem are left out: {broken}")
        return None

    return made_key


def stats(
    connection: Connection,
    report: Report,
    revision: str,
    file_bytes: int | None,
    absent_tables: Collection[str],
) -> StoreStats:
    """Count everything that `db stats` prints, in one pass over each index. absent_tables: tables that a
    database of an older schema lacks."""
    machines: Counter[tuple[Any, ...]] = Counter()
    builds: dict[str, Counter[bool]] = {}
    for core, placement, abi, count, verified in connection.execute(queries.counts_by_build()):
        machines[core, placement] += count
        builds.setdefault(abi, Counter()).update({True: verified, False: count - verified})
    plans, step_times = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for kind, counted in ((PlanRecord, plans), (StepTime, step_times)):
        columns = TABLES[kind].c
        if kind.kind.table not in absent_tables:
            key = (columns.core_sig, columns.placement_sig)
            for *machine, count in connection.execute(select(*key, func.count()).group_by(*key)):
                counted[tuple(machine)] = count
            for abi in connection.scalars(select(columns.kernel_abi).distinct()) if kind is StepTime else ():
                builds.setdefault(abi, Counter())
    rows = {Measurement.kind.table: machines.total()}
    for name, table in METADATA.tables.items():
        if name not in rows and name not in absent_tables:
            rows[name] = connection.scalar(select(func.count()).select_from(table)) or 0
    return StoreStats(
        revision,
        dict(sorted(rows.items())),
        tuple(_signatures(machines, plans, step_times, report)),
        tuple(
            BuildCount(abi, counts.total(), counts[False])
            for abi, counts in sorted(builds.items(), key=lambda item: str(item[0]))
        ),
        file_bytes,
    )


def _signatures(
    measurements: Counter[tuple[Any, ...]],
    plans: Counter[tuple[Any, ...]],
    step_times: Counter[tuple[Any, ...]],
    report: Report,
) -> Iterator[SignatureCount]:
    for key in sorted({*measurements, *plans, *step_times}, key=repr):
        machine = made(MachineKey, *key)
        if isinstance(machine, RecordError):
            report(f"rows of one machine are not counted: {machine}")
        else:
            yield SignatureCount(machine, measurements[key], plans[key], step_times[key])


def machines(
    connection: Connection,
    absent_tables: Collection[str],
    kinds: Collection[type[StoredRow]] = KINDS.values(),
) -> set[MachineKey]:
    """Every kind of machine that has rows of these kinds. absent_tables: tables that the database lacks."""
    keys = set[tuple[Any, ...]]()
    for kind in kinds:
        columns = TABLES[kind].c
        if kind.kind.table not in absent_tables:
            names = ["core_sig"] if kind.kind.on_one_core else ["core_sig", "placement_sig"]
            query = select(*(columns[name] for name in names)).distinct()
            keys |= {(*row, SINGLE_CORE)[:2] for row in connection.execute(query)}
    return {machine for key in keys if isinstance(machine := made(MachineKey, *key), MachineKey)}
