"""Numbers of rows: by table, by kind of machine, by build, by program; read from indexes, not from rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from phasewise.kerneldb import queries
from phasewise.kerneldb.codec import flat_names
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.models import (
    Base,
    MeasurementRow,
    PredictorScoreRow,
    ProblemRow,
    PromotionRow,
    ServicePlanRow,
    StepTimeRow,
    StorageDuelRow,
    UserKernelPromotionRow,
    UserKernelTimingRow,
)
from phasewise.kerneldb.records import SINGLE_CORE, MachineKey, Problem
from phasewise.kerneldb.rows import made

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

Report = Callable[[str], None]

ABSENT = "absent tables"
"""Key of a session's `info`: the tables that an older schema has not."""


@dataclass(frozen=True)
class Key:
    """The columns that timings must share to be compared."""

    problem: Problem
    machine: MachineKey
    kernel_abi: str


@dataclass(frozen=True)
class KeyCount:
    """The number of measurements of one key."""

    key: Key
    verified: int = 0
    imported: int = 0


@dataclass(frozen=True)
class TimedKey:
    """A key that has measurements, and where these were taken."""

    key: Key
    is_verified: bool
    """One or more were measured here."""
    is_imported: bool
    """One or more were imported."""


@dataclass(frozen=True)
class SignatureCount:
    """The number of rows of one kind of machine."""

    machine: MachineKey
    measurements: int
    service_plans: int
    step_times: int


@dataclass(frozen=True)
class BuildCount:
    """The number of rows of one build of a kernel family."""

    kernel_abi: str
    measurements: int
    unverified: int
    """Measurements that were imported and not measured here."""


@dataclass(frozen=True)
class ProgramCount:
    """The rows of a table that one version of the program wrote, and the times of the first and last."""

    program_version: str
    rows: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True)
class StoreStats:
    """Sizes. `file_bytes` is None where the database is no local file."""

    revision: str
    rows: Mapping[str, int]
    signatures: tuple[SignatureCount, ...]
    builds: tuple[BuildCount, ...]
    file_bytes: int | None


def problems_by_id(session: Session) -> dict[int, Problem | RecordError]:
    """Every problem; the reason instead of one that breaks its bounds."""
    columns = (getattr(ProblemRow, name) for name in flat_names(Problem))
    return {
        number: made(Problem, *values) for number, *values in session.execute(select(ProblemRow.id, *columns))
    }


def count_by_key(session: Session, report: Report, *where: ColumnElement[bool]) -> Iterator[KeyCount]:
    """Every key that has measurements, ordered by machine; one that breaks its bounds is reported."""
    counts_by_key: dict[tuple[Any, ...], Counter[bool]] = {}
    for *columns, verified, count in session.execute(queries.counts_by_key(*where)):
        counts_by_key.setdefault(tuple(columns), Counter())[bool(verified)] += count
    made_keys = _keys(session, report)
    for key_columns, counts in counts_by_key.items():
        key = made_keys(key_columns)
        if key is not None:
            yield KeyCount(key, counts[True], counts[False])


def timed_keys(session: Session, report: Report, core_sig: str | None) -> Iterator[TimedKey]:
    """As `count_by_key`, without the numbers: what it takes goes by keys, not by measurements."""
    made_keys = _keys(session, report)
    for *columns, is_verified, is_imported in session.execute(queries.keys_by_seeking(core_sig)):
        key = made_keys(tuple(columns))
        if key is not None:
            yield TimedKey(key, bool(is_verified), bool(is_imported))


def _keys(session: Session, report: Report) -> Callable[[tuple[Any, ...]], Key | None]:
    """Makes a key of its columns; None for one that breaks its bounds, which is reported."""
    problems = problems_by_id(session)

    def made_key(columns: tuple[Any, ...]) -> Key | None:
        core, placement, abi, problem_id = columns
        machine, problem = made(MachineKey, core, placement), problems.get(problem_id)
        if isinstance(machine, MachineKey) and isinstance(problem, Problem):
            return Key(problem, machine, abi)
        broken = problem if isinstance(machine, MachineKey) else machine
        report(f"timings of one problem are left out: {broken}")
        return None

    return made_key


def promoted_keys(session: Session, verified: bool, *where: ColumnElement[bool]) -> set[Key]:
    """The keys with a schedule in use: here, or where it came from. where: conditions on promotions."""
    problems = problems_by_id(session)
    return {
        Key(problem, machine, abi)
        for core, placement, abi, problem_id in session.execute(queries.promoted_keys(verified, *where))
        if isinstance(problem := problems.get(problem_id), Problem)
        and isinstance(machine := made(MachineKey, core, placement), MachineKey)
    }


def has_table(session: Session, model: type[Base]) -> bool:
    """False where the database's schema is older than the table."""
    return model.__tablename__ not in session.info.get(ABSENT, ())


def table_sizes(session: Session, measurements: int) -> dict[str, int]:
    """Rows by table; those of measurements are counted already."""
    sizes = {MeasurementRow.__tablename__: measurements}
    for name, table in Base.metadata.tables.items():
        if name not in sizes and name not in session.info.get(ABSENT, ()):
            sizes[name] = session.scalar(select(func.count()).select_from(table)) or 0
    return dict(sorted(sizes.items()))


def stats(session: Session, report: Report, revision: str, file_bytes: int | None) -> StoreStats:
    """Everything that `db stats` prints, in one pass over each index."""
    machines: Counter[tuple[Any, ...]] = Counter()
    builds: dict[str, Counter[bool]] = {}
    for core, placement, abi, count, verified in session.execute(queries.counts_by_build()):
        machines[core, placement] += count
        builds.setdefault(abi, Counter()).update({True: verified, False: count - verified})
    if has_table(session, StepTimeRow):
        for abi in session.scalars(select(StepTimeRow.kernel_abi).distinct()):
            builds.setdefault(abi, Counter())
    plans, step_times = _by_machine(session, ServicePlanRow), _by_machine(session, StepTimeRow)
    return StoreStats(
        revision,
        table_sizes(session, machines.total()),
        tuple(_signatures(machines, plans, step_times, report)),
        tuple(
            BuildCount(abi, counts.total(), counts[False])
            for abi, counts in sorted(builds.items(), key=lambda item: str(item[0]))
        ),
        file_bytes,
    )


def _by_machine(session: Session, model: type[ServicePlanRow | StepTimeRow]) -> Counter[tuple[Any, ...]]:
    if not has_table(session, model):
        return Counter()
    key = (model.core_sig, model.placement_sig)
    counted = session.execute(select(*key, func.count()).group_by(*key))
    return Counter({(core, placement): count for core, placement, count in counted})


def plan_machines(session: Session) -> set[MachineKey]:
    """The kinds of machine that have plans or step times."""
    keys = [key for model in (ServicePlanRow, StepTimeRow) for key in _by_machine(session, model)]
    return {machine for key in keys if isinstance(machine := made(MachineKey, *key), MachineKey)}


def machines(session: Session) -> set[MachineKey]:
    """Every kind of machine that rows are of."""
    keys = {
        (core, placement)
        for model in (
            *(MeasurementRow, PromotionRow, StorageDuelRow),
            *(ServicePlanRow, StepTimeRow, PredictorScoreRow),
        )
        if has_table(session, model)
        for core, placement in session.execute(select(model.core_sig, model.placement_sig).distinct())
    }
    users = (UserKernelTimingRow, UserKernelPromotionRow)
    keys |= {
        (core, SINGLE_CORE)
        for model in users
        if has_table(session, model)
        for core in session.scalars(select(model.core_sig).distinct())
    }
    return {machine for key in keys if isinstance(machine := made(MachineKey, *key), MachineKey)}


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


def programs(
    session: Session, model: type[MeasurementRow | PromotionRow | ServicePlanRow], core_sig: str
) -> list[ProgramCount]:
    """The rows of one kind of core by the program that wrote them."""
    at_ms = model.created_at_ms
    query = select(model.program_version, func.count(), func.min(at_ms), func.max(at_ms))
    counted = session.execute(query.where(model.core_sig == core_sig).group_by(model.program_version))
    return [ProgramCount(*row) for row in counted]
