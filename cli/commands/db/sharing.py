"""`phasewise db export | import | merge | diff | verify | gc`: schedules from and for machines like this."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise._words import counted
from phasewise.cli.commands.db import text as db_text
from phasewise.cli.options import DbOption, JsonOption, ThreadsOption
from phasewise.cli.present import note, print_json, say
from phasewise.workflows.database import json as database_json

if TYPE_CHECKING:
    from phasewise.workflows.database.sharing import Imported

EXIT_FAILURE = 1

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
    users_kernels: Annotated[
        bool,
        typer.Option(
            "--user-kernels",
            help="also export parameters of your own kernels; they contain the names of their functions",
        ),
    ] = False,
    db: DbOption = None,
) -> None:
    """Print all schedules, their timings and promotions as JSON lines, to be shared.

    The same rows give the same bytes. There are no host names in it, and no service plans.
    """
    from phasewise.workflows.database.sharing import export_rows

    found = export_rows(db, signature or (), step_times=step_times, users_kernels=users_kernels, report=note)
    _write_out(found.lines)
    note(f"{counted(found.n_rows, 'row')} of {counted(found.n_machines, 'kind')} of machine")


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


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="what `db export` wrote; `-` is stdin")],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add the rows of FILE that are not there yet, unverified: unused until `db verify` measures them.

    A damaged line, or one that no kernel could run, is refused and reported; the other lines are imported.
    The exit code is 1 if any line was refused.
    """
    from phasewise.workflows.database.sharing import import_file

    found = import_file(file, db, note)
    _print_imported(found, as_json)
    if found.n_refused:
        raise typer.Exit(EXIT_FAILURE)


def merge(other: OtherArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Add the timings and promotions of another database that are not in this one yet, unverified.

    Its step times come too; `tune-config --evaluator recorded` replays them.
    """
    from phasewise.workflows.database.sharing import merge_database

    _print_imported(merge_database(other, db, note), as_json)


def _print_imported(found: Imported, as_json: bool) -> None:
    taken = found.taken
    if as_json:
        counts = {"read": taken.read, "added": taken.added, "known": taken.known, "refused": found.n_refused}
        print_json({"source": found.source, **counts})
    else:
        refusals = f", {counted(found.n_refused, 'line')} refused" if found.n_refused else ""
        say(f"{found.source}: {counted(taken.added, 'row')} added, {taken.known} known already{refusals}")
    if taken.added:
        note("what was added is not used before `phasewise db verify` has measured it")


def diff(other: OtherArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Compare the schedules that this and another database prefer, problem by problem.

    The exit code is 1 if they differ.
    """
    from phasewise.workflows.database.sharing import compare_databases

    found = compare_databases(other, db, note)
    machines = database_json.labels(one.key.machine for one in found.differences)
    differences = database_json.diff_fields(found, machines)
    if as_json:
        fields = {"same": found.same, "differences": differences}
        print_json({**fields, "machines": database_json.machine_fields(machines)})
    else:
        say(f"the same: {counted(found.same, 'schedule')}; different: {len(differences)}")
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
    """Measure the best imported schedules on this machine, and use those that are proven faster.

    The rule is that of `tune-kernels`: in pairs of timings against what is in
    use here, the interval of the gain must lie above 1. Where it holds 1 and is
    wider than a quarter, there is no verdict, because the machine was busy: the
    schedule stays unverified, and the next run measures it again.

    Only rows of machines and kernels like these can be verified. What was measured is kept at once: the
    command goes on where it was interrupted.
    """
    from phasewise.topology import read_machine
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.database.sharing import existing_store
    from phasewise.workflows.database.verify_schedules import verdicts

    found: list[dict[str, Any]] = []
    with existing_store(db, note) as store:
        for verdict in verdicts(store, read_machine(), top, threads, user_lock(note), note):
            found.append(database_json.verdict_fields(verdict))
            note(db_text.verdict_line(verdict))
        left = sum(build.unverified for build in store.stats().builds)
    if left:
        note(f"{left} imported rows are of other machines or builds, undecided, or not among the best {top}")
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
    from phasewise.workflows.database.sharing import existing_store

    with existing_store(db, note) as store:
        deleted = collect_garbage(store, kernel_abis(), keep, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "deleted": dict(deleted)})
    else:
        counts = [counted(count, table.replace("_", " ")) for table, count in deleted.items() if count]
        say(f"{'would delete' if dry_run else 'deleted'} {', '.join(counts) or 'nothing'}")
