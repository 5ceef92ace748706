"""`phasewise db push | pull | export | import | merge | diff | gc`: rows shared between machines."""

from __future__ import annotations

import os
import sys
import textwrap
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise._options import REQUIRED, argument, option
from phasewise._words import counted
from phasewise.cli.commands.db.rows import diff_fields, diff_text
from phasewise.cli.commands.topo.text import core_words
from phasewise.cli.options import JsonOption
from phasewise.cli.present import EXIT_FAILURE, note, print_json
from phasewise.cli.tables import WIDTH, present
from phasewise.workflows.database.settings import Leaving, Trust
from phasewise.workflows.options import DB

if TYPE_CHECKING:
    from phasewise.kerneldb.portable import Taken
    from phasewise.kerneldb.remote_index import Bundle
    from phasewise.workflows.database.sharing import Imported

RemoteArgument = Annotated[
    str,
    typer.Argument(
        metavar="REMOTE", help="a folder, such as a git working tree, or an https:// address of static files"
    ),
]


def push(
    *,
    remote: RemoteArgument,
    leaving: Leaving,
    dry_run: bool = option(
        False,
        "print every line that would leave, and name its fields (--json: bundles and fields "
        "alone); send nothing",
    ),
    sign: Path | None = option(None, "sign the index with this SSH key", metavar="KEY"),
    trust: Trust,
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """Add this database's rows to REMOTE, a bundle for each kind of core, and print what to pin.

    $ phasewise db push fleet --dry-run
    $ phasewise db push fleet --sign ~/.ssh/id_ed25519 --allowed-signers signers

    A signature vouches for the whole index: where REMOTE has one already, it is
    checked by --digest or --allowed-signers first. Rows whose names hold this
    host's, the user's or a path stay here.
    """
    from phasewise.workflows.database.remote import preview
    from phasewise.workflows.database.remote import push as push_rows

    if dry_run:
        counted_only = deque[str](maxlen=0).extend  # every line is read, and none is kept
        previewed = preview(db, leaving, counted_only if as_json else write_out, note)
        if as_json:
            print_json({"remote": remote, **vars(previewed)})
            return
        _tell(previewed.bundles)
        note(textwrap.fill(f"fields that would leave: {', '.join(previewed.fields)}", WIDTH))
        return
    done = push_rows(remote, db, leaving, trust, sign, note)
    if not as_json:
        _tell(done.bundles)
    fields = {"remote": remote, "bundles": done.bundles, "new": len(done.new), "serial": done.index.serial}
    told = f"{counted(len(done.new), 'new bundle')}; the index has the digest\n{done.digest}"
    present(as_json, {**fields, "digest": done.digest}, [told])


def _tell(bundles: list[Bundle]) -> None:
    for bundle in bundles:
        told = f"{bundle.path}: {counted(bundle.rows, 'row')} of {core_words(bundle.core).replace('+', ' ')}"
        note(textwrap.fill(told, WIDTH, subsequent_indent="    "))


def pull(
    remote: RemoteArgument,
    trust: Trust,
    every_core: bool = option(False, "bundles of every kind of core, not only of cores like these", "--all"),
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """Import what REMOTE has for cores like these, unverified: schedules wait to be timed here.

    $ phasewise db pull fleet --allowed-signers signers
    $ phasewise db pull https://example.org/fleet --allowed-signers signers --all

    It is believed by --digest or --allowed-signers, and refused whole, in one
    line, where anything in it was changed, is too large or makes no sense.
    """
    from phasewise.workflows.database.remote import pull as pull_rows

    done = pull_rows(remote, db, trust, every_core=every_core, report=note)
    if not done.bundles and not as_json:
        note(f"{remote} has no bundle for cores like these; --all pulls those of every kind")
    counts, told = _taken(done.taken)
    bundles = counted(len(done.bundles), "bundle")
    present(as_json, {"remote": remote, "bundles": done.bundles, **counts}, [f"{bundles}: {told}"])


def _taken(taken: Taken) -> tuple[dict[str, int], str]:
    """JSON fields and words of the rows that were imported."""
    counts = {name: getattr(taken, name) for name in ("read", "added", "known")}
    return counts, f"{counted(taken.added, 'row')} added, {taken.known} known already"


OtherArgument = Annotated[
    str, typer.Argument(metavar="OTHER", help="the file or URL of another database, or a file of schedules")
]


def export(
    leaving: Leaving,
    in_use: bool = option(False, "of schedules only those in use, each with its newest timing"),
    db: str | None = DB(None),
) -> None:
    """Print all schedules, their timings and promotions, and plans, as JSON lines, to be shared.

    $ phasewise db export > tuned.jsonl
    $ phasewise db export --in-use --signature here --no-plans > winners.jsonl

    Scores of length predictors are among them. The same rows give the same
    bytes. There are no host names in it. Plans name places of the topology, so
    that they fit like machines whose cores have other numbers.
    """
    from phasewise.workflows.database.sharing import export_rows

    exported = export_rows(db, leaving, write_out, note, in_use=in_use)
    note(f"{counted(exported.n_rows, 'row')} of {counted(len(exported.machines), 'kind')} of machine")


def write_out(lines: Iterable[str]) -> None:
    """Print lines to stdout, which may be a file on a full disk."""
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
    file: str = argument(REQUIRED, "what `db export` wrote; `-` is stdin", "FILE"),
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """Add the rows of FILE that are not there yet, unverified: unused until they are timed here.

    $ phasewise db import tuned.jsonl
    $ phasewise db import - --db other.db < tuned.jsonl

    `tune-kernels` and a server of a model time first what was in use elsewhere. A
    damaged line, or one that no kernel could run, is refused and reported; the other lines are imported.
    The exit code is 1 if any line was refused.
    """
    from phasewise.workflows.database.sharing import import_file

    imported = import_file(file, db, note)
    _print_imported(imported, as_json)
    if imported.n_refused:
        raise typer.Exit(EXIT_FAILURE)


def merge(other: OtherArgument, db: str | None = DB(None), as_json: JsonOption = False) -> None:
    """Add the timings and promotions of another database that are not in this one yet, unverified.

    $ phasewise db merge other.db
    $ phasewise db merge tuned.jsonl --json

    Its scores of predictors and its step times come too.
    """
    from phasewise.workflows.database.sharing import merge_database

    _print_imported(merge_database(other, db, note), as_json)


def _print_imported(imported: Imported, as_json: bool) -> None:
    counts, told = _taken(imported.taken)
    refusals = f", {counted(imported.n_refused, 'line')} refused" if imported.n_refused else ""
    fields = {"source": imported.source, **counts, "refused": imported.n_refused}
    present(as_json, fields, [f"{imported.source}: {told}{refusals}"])
    if imported.taken.added:
        note("a schedule that was added is used once `tune-kernels`, or a server, has found it faster here")


def diff(other: OtherArgument, db: str | None = DB(None), as_json: JsonOption = False) -> None:
    """Compare what this and another database prefer: schedules, plans, storages, users' kernels.

    $ phasewise db diff other.db
    $ phasewise db diff tuned.jsonl --json

    Scores of predictors too. A schedule that is in use on one side and
    imported or only measured on the other is a difference. Of step times it
    counts those that one side alone has. The exit code is 1 if they differ.
    """
    from phasewise.workflows.database.sharing import compare_databases

    comparison = compare_databases(other, db, note)
    fields = diff_fields(comparison)
    present(as_json, fields, diff_text(comparison, fields))
    if comparison.differences or comparison.others:
        raise typer.Exit(EXIT_FAILURE)


def gc(
    keep: int | None = option(
        None,
        "keep raw samples of the N fastest schedules of each problem and of promoted ones, and a "
        "summary of others; of plans and scores the N newest",
        min=1,
    ),
    dry_run: bool = option(False, "print what would be deleted; delete nothing"),
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """Delete the rows of earlier builds of this machine's kernels; with --keep summarise slow schedules.

    $ phasewise db gc --dry-run
    $ phasewise db gc --keep 4

    A build whose winners `tune-kernels` has yet to time again is kept, and a line says so.

    Of a schedule that lost, one timing is kept, with the least, the quartiles and the largest of its
    samples. `tune-kernels` does this by itself, for all but 16, where more than 100,000 timings are of this
    kind of machine, and measures again what it needs later. Rows of other machines' kernels are kept.
    """
    from phasewise.cython_kernels._native import kernel_abis
    from phasewise.kerneldb.upkeep import collect_garbage
    from phasewise.workflows.database.sharing import existing_store

    with existing_store(db, note) as store:
        garbage = collect_garbage(store, kernel_abis(), keep, dry_run=dry_run)
    counts = [counted(count, table.replace("_", " ")) for table, count in garbage.deleted.items() if count]
    lines = [f"{'would delete' if dry_run else 'deleted'} {', '.join(counts) or 'nothing'}"]
    for build, winners in garbage.spared.items():
        lines.append(f"{build} stays until tune-kernels has timed {counted(winners, 'winner')} of it again")
    if keep is not None:
        verb = "would summarise" if dry_run else "summarised"
        lines.append(f"{verb} {counted(garbage.summarised, 'timing')}")
    present(as_json, {"dry_run": dry_run, **vars(garbage)}, lines)
