"""`phasewise db export | import | merge | diff | verify | gc`: schedules from and for machines like this."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from phasewise.cli.options import DbOption, JsonOption, ThreadsOption
from phasewise.cli.present import note, print_json, say
from phasewise.cli.render import db_text
from phasewise.workflows import database_json

if TYPE_CHECKING:
    from phasewise.kerneldb.portable import Taken
    from phasewise.kerneldb.records import MachineKey
    from phasewise.kerneldb.store import Store

MAX_REFUSALS_SHOWN = 20
EXIT_FAILURE = 1
HERE = "here"

OtherArgument = Annotated[
    str, typer.Argument(metavar="OTHER", help="the file or URL of another database, or a file of schedules")
]


def export(
    signature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="only machines whose core or placement signature contains TEXT; `here`: like this one",
        ),
    ] = None,
    step_times: Annotated[
        bool,
        typer.Option(
            "--step-times",
            help="also export the step times of `tune-config`; they contain the names of your models",
        ),
    ] = False,
    db: DbOption = None,
) -> None:
    """Print all schedules, their timings and promotions as JSON lines, to be shared.

    The same rows give the same bytes. There are no host names in it, and no service plans.
    """
    from phasewise.kerneldb.errors import ExportFileError
    from phasewise.kerneldb.portable import export_lines, rows_of

    with _existing(db) as store:
        rows = [*rows_of(store, _wanted(signature), step_times=step_times)]
    if signature and not rows:
        raise ExportFileError(f"no rows are of a machine with {' or '.join(signature)} in its signature")
    _write_out(export_lines(rows))
    kinds = len({row.origin.machine for row in rows})
    note(f"{len(rows)} rows of {kinds} kind{'s' if kinds != 1 else ''} of machine")


def _write_out(lines: Iterable[str]) -> None:
    """To stdout, which may be a file on a full disk."""
    from phasewise.kerneldb.errors import ExportFileError

    try:
        sys.stdout.writelines(lines)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise ExportFileError(f"the export cannot be written: {error.strerror}") from None


def _wanted(signature: list[str] | None) -> Callable[[MachineKey], bool]:
    if not signature:
        return lambda _: True
    parts = [_core_signature_here() if text == HERE else text for text in signature]
    return lambda machine: any(
        part in sig for part in parts for sig in (machine.core_sig, machine.placement_sig)
    )


def _core_signature_here() -> str:
    from phasewise.topology import core_signature, read_machine

    return core_signature(read_machine())


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="what `db export` wrote; `-` is stdin")],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add the rows of FILE that are not there yet, unverified: unused until `db verify` measures them.

    A damaged line, or one that no kernel could run, is refused and reported; the other lines are imported.
    The exit code is 1 if any line was refused.
    """
    from phasewise.kerneldb.portable import import_rows, read_export
    from phasewise.kerneldb.store import open_store

    refusals = _Refusals(file)
    with _opened(file) as stream:
        rows = read_export(stream, file, refusals.add)
        with open_store(db, note) as store:
            taken = import_rows(store, rows)
    refusals.close()
    _print_taken(file, taken, refusals.count, as_json)
    if refusals.count:
        raise typer.Exit(EXIT_FAILURE)


class _Refusals:
    """Says the first few on stderr and counts them all."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self._name = name

    def add(self, line_number: int, reason: str) -> None:
        self.count += 1
        if self.count <= MAX_REFUSALS_SHOWN:
            note(f"{self._name}:{line_number}: refused: {reason}")

    def close(self) -> None:
        if self.count > MAX_REFUSALS_SHOWN:
            note(f"{self._name}: {self.count - MAX_REFUSALS_SHOWN} more lines were refused")


def merge(other: OtherArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Add the timings and promotions of another database that are not in this one yet, unverified.

    Its step times come too; `tune-config --evaluator recorded` replays them.
    """
    from phasewise.kerneldb.location import redacted
    from phasewise.kerneldb.portable import import_rows, rows_of
    from phasewise.kerneldb.store import open_store

    with _other_store(other) as source, open_store(db, note) as store:
        taken = import_rows(store, rows_of(source, step_times=True))
    _print_taken(redacted(other), taken, 0, as_json)


def _print_taken(name: str, taken: Taken, refused: int, as_json: bool) -> None:
    if as_json:
        counts = {"read": taken.read, "added": taken.added, "known": taken.known, "refused": refused}
        print_json({"source": name, **counts})
    else:
        refusals = f", {refused} lines refused" if refused else ""
        say(f"{name}: {taken.added} rows added, {taken.known} known already{refusals}")
    if taken.added:
        note("what was added is not used before `phasewise db verify` has measured it")


def diff(other: OtherArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Compare the schedules that this and another database prefer, problem by problem.

    The exit code is 1 if they differ.
    """
    from phasewise.kerneldb import upkeep

    with _other_store(other) as there, _existing(db) as here:
        found = upkeep.diff(here, there)
    machines = database_json.labels(one.key.machine for one in found.differences)
    differences = database_json.diff_fields(found, machines)
    if as_json:
        fields = {"same": found.same, "differences": differences}
        print_json({**fields, "machines": database_json.machine_fields(machines)})
    else:
        say(f"{found.same} schedules are the same, {len(differences)} differ")
        if differences:
            db_text.print_diff(differences)
    if differences:
        raise typer.Exit(EXIT_FAILURE)


def verify(
    top: Annotated[
        int, typer.Option(min=1, max=1000, help="measure the N best imported schedules of each problem")
    ] = 3,
    threads: ThreadsOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the best imported schedules on this machine, and use those that a paired comparison confirms.

    Only rows of machines and kernels like these can be verified. What was measured is kept at once: the
    command goes on where it was interrupted.
    """
    from phasewise.topology import read_machine
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.verify_schedules import verdicts

    found: list[dict[str, Any]] = []
    with _existing(db) as store:
        for verdict in verdicts(store, read_machine(), top, threads, user_lock(note), note):
            found.append(database_json.verdict_fields(verdict))
            note(db_text.verdict_line(verdict))
        left = sum(build.unverified for build in store.stats().builds)
    if left:
        note(f"{left} imported rows are of other machines or builds, or not among the best {top}")
    if as_json:
        print_json({"verdicts": found, "unverified_rows": left})
    else:
        db_text.print_verdicts(found)


def gc(
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="keep only the N fastest schedules of each problem and the promoted ones"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be deleted; delete nothing")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the rows of earlier builds of this machine's kernels, and with --keep those of slow schedules.

    A later `tune-kernels` measures anew what it needs of them. Rows of other machines' kernels stay.
    """
    from phasewise.cython_kernels._native import kernel_abis
    from phasewise.kerneldb.upkeep import collect_garbage

    with _existing(db) as store:
        deleted = collect_garbage(store, kernel_abis(), keep, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "deleted": dict(deleted)})
    else:
        counts = ", ".join(f"{count} {table.replace('_', ' ')}s" for table, count in deleted.items())
        say(f"{'would delete' if dry_run else 'deleted'} {counts}")


@contextmanager
def _existing(db: str | None) -> Iterator[Store]:
    """A database that has to be there already."""
    from phasewise.kerneldb.errors import KernelDbError
    from phasewise.kerneldb.location import locate
    from phasewise.kerneldb.store import open_store

    location = locate(db)
    if location.is_absent:
        raise KernelDbError(f"there is no database at {location.name}")
    with open_store(db, note) as store:
        yield store


@contextmanager
def _other_store(other: str) -> Iterator[Store]:
    """Another database, or a file of schedules as one in memory."""
    from phasewise.kerneldb.location import MEMORY_URL
    from phasewise.kerneldb.portable import import_rows, read_export
    from phasewise.kerneldb.store import open_store

    if not _is_export(other):
        with _existing(other) as store:
            yield store
        return
    refusals = _Refusals(other)
    with _opened(other) as stream, open_store(MEMORY_URL) as store:
        import_rows(store, read_export(stream, other, refusals.add))
        refusals.close()
        yield store


def _is_export(other: str) -> bool:
    """A regular file that does not begin as a SQLite database does."""
    path = Path(other)
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(1) == b"{"


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    from phasewise.kerneldb.errors import ExportFileError

    if file == "-":
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(Path(file).open("rb"))
        except OSError as error:
            raise ExportFileError(f"{file} cannot be read: {error.strerror}") from None
        yield stream
