"""Reads of the database when a server starts: they make serving faster, and a start succeeds without them.

Each read is kept in a small copy in the cache directory. Where the database cannot be read, a start goes on
with the copy, and without a copy as if nothing was tuned.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from phasewise._files import read_file, write_file
from phasewise._places import cache_folder
from phasewise.kerneldb.errors import DatabaseNameError, KernelDbError
from phasewise.kerneldb.location import MEMORY_URL, Location, locate

if TYPE_CHECKING:
    from phasewise.kerneldb.counts import Report
    from phasewise.kerneldb.records import MachineKey, Measurement, PlanRecord, StoredRow
    from phasewise.kerneldb.store import Store

R = TypeVar("R", bound="StoredRow")

TRY_AGAIN_S = 300.0
"""Seconds for which this process does not wait again for a database that it could not read."""
MOST_COPY_BYTES = 64 << 20
_VERIFIED, _IMPORTED = b"+", b"-"
"""First byte of a line of a copy, before the row as a file of schedules has it."""

_log = logging.getLogger(__name__)
_missed_s: dict[Location, float] = {}
_n_missed = 0


def n_without_database() -> int:
    """Number of times that this process went on without a database that it was to read."""
    return _n_missed


@contextmanager
def open_start_reads(
    db: str | os.PathLike[str] | None, report: Report = _log.warning
) -> Iterator[StartReads]:
    """Open the database that `db` names for the reads of a start; a database that is not there yet is
    created. `report` gets one line where it cannot be read. DatabaseNameError where `db` names no database.
    """
    from phasewise.kerneldb.store import open_store

    location = locate(db)
    with ExitStack() as stack:
        if time.monotonic() - _missed_s.get(location, -math.inf) < TRY_AGAIN_S:
            reads = StartReads(None, location, report)
        else:
            try:
                reads = StartReads(stack.enter_context(open_store(db, report)), location, report)
            except DatabaseNameError:
                raise
            except KernelDbError as error:
                reads = _missing(location, error, report)
        yield reads


class StartReads:
    """The reads of a start: from `store`, or, where it is None, from the copy of the last read."""

    def __init__(self, store: Store | None, location: Location, report: Report) -> None:
        self.store, self._location, self._report = store, location, report

    def newest_plan(self, machine: MachineKey, model_key: str, phase: str) -> PlanRecord | None:
        """Read `Store.newest_plan`, or its copy."""

        def read(store: Store) -> list[PlanRecord]:
            plan = store.newest_plan(machine, model_key, phase)
            return [] if plan is None else [plan]

        return next(iter(self._rows(read, "plan", machine, model_key, phase)), None)

    def promoted_measurements(self, machine: MachineKey) -> list[Measurement]:
        """Read `Store.promoted_measurements`, or their copy."""
        return self._rows(lambda store: store.promoted_measurements(machine), "schedules", machine)

    def rows(self, kind: type[R], **equal: object) -> list[R]:
        """Read `Store.rows`, or their copy."""
        return self._rows(lambda store: store.rows(kind, **equal), kind.kind.word, *sorted(equal.items()))

    def _rows(self, read: Callable[[Store], Sequence[R]], *key: object) -> list[R]:
        copy = _folder_of(self._location) / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        if self.store is not None:
            try:
                rows = [*read(self.store)]
            except KernelDbError as error:
                self.store = _missing(self._location, error, self._report).store
            else:
                if self._location.url != MEMORY_URL:
                    _keep(copy, rows)
                return rows
        return cast("list[R]", _kept(copy))


def _missing(location: Location, error: KernelDbError, report: Report) -> StartReads:
    """Report in one line, and count, that the database cannot be read; return reads from the copy."""
    global _n_missed
    _n_missed += 1
    _missed_s[location] = time.monotonic()
    instead = (
        "what was last read of it here" if _folder_of(location).is_dir() else "default plans and schedules"
    )
    report(f"{error}; this start goes on with {instead}")
    return StartReads(None, location, report)


def _folder_of(location: Location) -> Path:
    name = str(location.file or location.url).encode("utf-8", "surrogateescape")
    return cache_folder() / "databases" / hashlib.sha256(name).hexdigest()[:32]


def _keep(copy: Path, rows: Sequence[StoredRow]) -> None:
    """Write the rows into the copy where they differ from it; errors of the file system are ignored."""
    from phasewise.kerneldb.portable import row_line

    trust = {True: _VERIFIED, False: _IMPORTED}
    data = b"".join(trust[row.origin.verified] + row_line(row).encode() + b"\n" for row in rows)
    with suppress(OSError):
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not copy.exists() or _read(copy) != data:
            write_file(copy, data)


def _kept(copy: Path) -> list[StoredRow]:
    """Read the rows of the copy, without lines that hold no row; none where there is no copy."""
    from phasewise.kerneldb.portable import read_row
    from phasewise.kerneldb.records import trusted

    rows: list[StoredRow] = []
    for line in _read(copy).splitlines(keepends=True):
        with suppress(ValueError, RecursionError):
            rows.append(trusted(read_row(line[1:]), line[:1] == _VERIFIED))
    return rows


def _read(copy: Path) -> bytes:
    try:
        return read_file(copy, MOST_COPY_BYTES)
    except OSError:
        return b""
