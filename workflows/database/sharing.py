"""Rows of tuning databases for and from other machines: `db export`, `import`, `merge` and `diff`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO

from phasewise._files import open_file, open_input
from phasewise._words import counted
from phasewise.kerneldb.errors import ExportFileError, ForeignDatabaseError, KernelDbError
from phasewise.kerneldb.location import locate, redacted
from phasewise.kerneldb.portable import (
    MAX_ROWS,
    Taken,
    export_lines,
    groups_of,
    import_rows,
    in_use_groups,
    read_export,
    rows_of,
    too_many,
)
from phasewise.kerneldb.records import PlanRecord
from phasewise.kerneldb.store import Store, open_store
from phasewise.workflows.database.settings import Leaving
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.diff import Diff
    from phasewise.kerneldb.records import MachineKey, StoredRow
    from phasewise.topology import Machine


class SharedPlans:
    """Converter of plans that earlier versions kept by cores: it names the places of this machine's cores."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._left_out = 0

    @cached_property
    def _machine(self) -> Machine:
        from phasewise.topology import read_machine

        return read_machine()

    def as_shared(self, record: PlanRecord) -> PlanRecord | None:
        """The record in shared form; None for another machine's cores, or cores that make no plan here."""
        from phasewise.tuner import plans
        from phasewise.tuner.errors import PlanError

        try:
            if record.phase not in plans.PHASES or plans.is_placed(record.plan_json):
                return record
            if record.origin.machine == plans.machine_key(self._machine):
                plan = plans.ServicePlan.from_json(record.plan_json)
                return replace(record, plan_json=plans.placed_json(plan, self._machine))
        except PlanError:
            pass  # counted below
        self._left_out += 1
        return None

    def close(self) -> None:
        """Report the number of plans that were left out."""
        if self._left_out:
            self._report(
                f"{counted(self._left_out, 'plan')} of another machine left out: earlier versions kept cores,"
                " whose places only `db export` there can name"
            )


MAX_REFUSALS_SHOWN = 20
HERE = "here"


@dataclass(frozen=True)
class Imported:
    """The source of imported rows, the number of rows, and the number of refused lines."""

    source: str
    taken: Taken
    n_refused: int


@dataclass
class Exported:
    """Numbers of exported rows and of the rows' kinds of machine; complete at the end of the export."""

    n_rows: int = 0
    machines: set[MachineKey] = field(default_factory=set)


def export_rows(
    db: str | None,
    leaving: Leaving,
    write: Callable[[Iterable[str]], None],
    report: Report,
    *,
    in_use: bool = False,
) -> Exported:
    """Write the rows that leave; in_use: of schedules only those in use.

    Raises ExportFileError, before anything is written, where no row is of a wanted machine, or too many are.
    """
    wanted, exported = wanted_machines(leaving), Exported()
    with existing_store(db, report) as store:
        timings = sum(count.total for count in store.key_counts() if wanted(count.key.machine))
        if timings > MAX_ROWS:
            raise ExportFileError(too_many(timings))
        shared = SharedPlans(report)
        groups = (in_use_groups if in_use else groups_of)(store, wanted, leaving.also, shared.as_shared)
        first = next(groups, None)
        if leaving.signature and first is None:
            raise ExportFileError(no_rows_of(leaving.signature))
        write(export_lines(_counted(chain([first or []], groups), exported)))
        shared.close()
    return exported


def _counted(groups: Iterable[list[StoredRow]], exported: Exported) -> Iterator[list[StoredRow]]:
    for group in groups:
        exported.n_rows += len(group)
        exported.machines.update(row.origin.machine for row in group)
        yield group


def wanted_machines(leaving: Leaving) -> Callable[[MachineKey], bool]:
    """Make a test for the machines whose rows leave: those with a wanted text in a signature, or all."""
    if not leaving.signature:
        return lambda _: True
    parts = [core_signature_here() if text == HERE else text for text in leaving.signature]
    return lambda machine: any(
        part in sig for part in parts for sig in (machine.core_sig, machine.placement_sig)
    )


def no_rows_of(signatures: Sequence[str]) -> str:
    """The reason why no row of these signatures is exported."""
    return f"no rows are of a machine with {' or '.join(signatures)} in its signature"


def core_signature_here() -> str:
    """The core signature of the cores that this process may use."""
    from phasewise.topology import core_signature, read_machine

    return core_signature(read_machine())


def import_file(file: str, db: str | None, report: Report = silent) -> Imported:
    """Add new rows of an export (`-`: stdin), unverified. Refused lines are reported."""
    refusals = _Refusals(file, report)
    with _opened(file) as stream:
        rows = read_export(stream, file, refusals.add)
        with open_store(db, report) as store:
            taken = import_rows(store, rows)
    refusals.close()
    return Imported(file, taken, refusals.count)


def merge_database(other: str, db: str | None, report: Report = silent) -> Imported:
    """Add the rows of another database, or of an export, unverified."""
    if _is_export(other):
        return import_file(other, db, report)
    with _other_database(other, report) as source, open_store(db, report) as store:
        taken = import_rows(store, rows_of(source))
    return Imported(redacted(other), taken, 0)


def compare_databases(other: str, db: str | None, report: Report = silent) -> Diff:
    """The differences between what another database, or an export, and this one prefer."""
    from phasewise.kerneldb.diff import diff

    with _other_store(other, report) as there, existing_store(db, report) as here:
        return diff(here, there, SharedPlans(report).as_shared)


@contextmanager
def existing_store(db: str | None, report: Report = silent) -> Iterator[Store]:
    """A database that has to be there already; KernelDbError where it is not."""
    location = locate(db)
    if location.is_absent:
        raise KernelDbError(f"there is no database at {location.name}")
    with open_store(db, report) as store:
        yield store


@contextmanager
def _other_database(other: str, report: Report) -> Iterator[Store]:
    with ExitStack() as stack:
        try:
            store = stack.enter_context(existing_store(other, report))
        except ForeignDatabaseError:
            raise ExportFileError(
                f"{redacted(other)} is neither a database nor a file that `phasewise db export` wrote"
            ) from None
        yield store


class _Refusals:
    """Reports the first refused lines of a file, and counts them all."""

    def __init__(self, name: str, report: Report) -> None:
        self.count = 0
        self._name = name
        self._report = report

    def add(self, line_number: int, reason: str) -> None:
        self.count += 1
        if self.count <= MAX_REFUSALS_SHOWN:
            self._report(f"{self._name}:{line_number}: refused: {reason}")

    def close(self) -> None:
        if self.count > MAX_REFUSALS_SHOWN:
            self._report(f"{self._name}: {self.count - MAX_REFUSALS_SHOWN} more lines were refused")


@contextmanager
def _other_store(other: str, report: Report) -> Iterator[Store]:
    """Open another database, or load a file of schedules into a temporary one, not into memory."""
    if not _is_export(other):
        with _other_database(other, report) as store:
            yield store
        return
    refusals = _Refusals(other, report)
    with (
        _opened(other) as stream,
        TemporaryDirectory(prefix="phasewise-") as folder,
        open_store(Path(folder) / "other.db") as store,
    ):
        import_rows(store, read_export(stream, other, refusals.add))
        refusals.close()
        yield store


def _is_export(other: str) -> bool:
    """True for a regular file that begins as JSON does, not as a SQLite database."""
    path = Path(other)
    if not path.is_file():
        return False
    with open_file(path) as stream:
        return stream.read(1) == b"{"


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(open_input(file))
        except OSError as error:
            raise ExportFileError(f"{file} cannot be read: {error.strerror}") from None
        yield stream
