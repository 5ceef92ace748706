"""`phasewise db push | pull`: what was learnt, to and from a folder or an HTTPS address."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise._words import counted
from phasewise.cli.commands.db.sharing import (
    NoPlansOption,
    ScoresOption,
    SignatureOption,
    StepTimesOption,
    UserKernelsOption,
    named_kinds,
    write_out,
)
from phasewise.cli.commands.topo.text import core_words
from phasewise.cli.options import DbOption, JsonOption
from phasewise.cli.present import note, print_json, say

if TYPE_CHECKING:
    from phasewise.kerneldb.remote_index import Bundle

WIDTH = 80

RemoteArgument = Annotated[
    str,
    typer.Argument(
        metavar="REMOTE",
        help="a folder, such as a git working tree, or an address of static files: https://, or what fsspec "
        "reads, e.g. hf://",
    ),
]
DigestOption = Annotated[
    str | None,
    typer.Option(metavar="SHA256", help="believe the remote's index if it has this digest, as `push` prints"),
]
SignersOption = Annotated[
    Path | None,
    typer.Option(
        "--allowed-signers",
        metavar="FILE",
        help="believe the remote's index if one of these signed it; a file as ssh-keygen reads it",
    ),
]


def push(
    remote: RemoteArgument,
    signature: SignatureOption = None,
    step_times: StepTimesOption = False,
    users_kernels: UserKernelsOption = False,
    plans: NoPlansOption = True,
    scores: ScoresOption = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="print every line that would leave, and name its fields (--json: bundles and fields "
            "alone); send nothing",
        ),
    ] = False,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="sign the index with this SSH key")] = None,
    digest: DigestOption = None,
    allowed_signers: SignersOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add this database's rows to REMOTE, a bundle for each kind of core, and print what to pin.

    $ phasewise db push fleet --dry-run
    $ phasewise db push fleet --sign ~/.ssh/id_ed25519 --allowed-signers signers

    A signature vouches for the whole index: where REMOTE has one already, it is
    checked by --digest or --allowed-signers first. Rows whose names hold this
    host's, the user's or a path stay here.
    """
    from phasewise.workflows.database.remote import Leaving, preview
    from phasewise.workflows.database.remote import push as push_rows
    from phasewise.workflows.database.signed_index import Trust

    leaving = Leaving(tuple(signature or ()), named_kinds(plans, scores, step_times, users_kernels))
    if dry_run:
        previewed = preview(db, leaving, _unwritten if as_json else write_out, note)
        if as_json:
            bundles = [asdict(bundle) for bundle in previewed.bundles]
            print_json({"remote": remote, "bundles": bundles, "fields": list(previewed.fields)})
            return
        _tell(previewed.bundles)
        note(textwrap.fill(f"fields that would leave: {', '.join(previewed.fields)}", WIDTH))
        return
    done = push_rows(remote, db, leaving, Trust(digest, allowed_signers), sign, note)
    if as_json:
        print_json(
            {
                "remote": remote,
                "bundles": [asdict(bundle) for bundle in done.bundles],
                "new": len(done.new),
                "serial": done.index.serial,
                "digest": done.digest,
            }
        )
        return
    _tell(done.bundles)
    say(f"{counted(len(done.new), 'new bundle')}; the index has the digest\n{done.digest}")


def _unwritten(lines: Iterable[str]) -> None:
    """Read all of it: what names the fields sees them on their way."""
    for _ in lines:
        pass


def _tell(bundles: list[Bundle]) -> None:
    for bundle in bundles:
        told = f"{bundle.path}: {counted(bundle.rows, 'row')} of {core_words(bundle.core).replace('+', ' ')}"
        note(textwrap.fill(told, WIDTH, subsequent_indent="    "))


def pull(
    remote: RemoteArgument,
    digest: DigestOption = None,
    allowed_signers: SignersOption = None,
    every_core: Annotated[
        bool, typer.Option("--all", help="bundles of every kind of core, not only of cores like these")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import what REMOTE has for cores like these, unverified: schedules wait to be timed here.

    $ phasewise db pull fleet --allowed-signers signers
    $ phasewise db pull https://example.org/fleet --allowed-signers signers --all

    It is believed by --digest or --allowed-signers, and refused whole, in one
    line, where anything in it was changed, is too large or makes no sense.
    """
    from phasewise.workflows.database.remote import pull as pull_rows
    from phasewise.workflows.database.signed_index import Trust

    done = pull_rows(remote, db, Trust(digest, allowed_signers), every_core=every_core, report=note)
    if as_json:
        counts = {"read": done.taken.read, "added": done.taken.added, "known": done.taken.known}
        print_json({"remote": remote, "bundles": [asdict(bundle) for bundle in done.bundles], **counts})
        return
    if not done.bundles:
        note(f"{remote} has no bundle for cores like these; --all pulls those of every kind")
    bundles = counted(len(done.bundles), "bundle")
    say(f"{bundles}: {counted(done.taken.added, 'row')} added, {done.taken.known} known already")
