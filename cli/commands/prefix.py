"""`phasewise prefix`: beginnings of prompts that servers keep in folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from phasewise._words import counted
from phasewise.cli.command_app import CommandApp
from phasewise.cli.options import (
    JsonOption,
)
from phasewise.cli.present import note, on_one_line, print_json, say

HELP = """See what servers keep of the beginnings of prompts.

$ phasewise prefix list kept
$ phasewise prefix verify kept"""

app = CommandApp(help=HELP)

EXIT_DAMAGED = 3

PathsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="DIR", help="folders of serve --prefix-cache"),
]


@app.command("list")
def list_(paths: PathsArgument, as_json: JsonOption = False) -> None:
    """Say what folders hold, by model and arithmetic.

    $ phasewise prefix list kept
    $ phasewise prefix list kept --json
    """
    from phasewise.workflows.prefix.kept import list_prefixes

    prefixes = list_prefixes(paths)
    if as_json:
        print_json({"prefixes": [prefix.to_json() for prefix in prefixes]})
        return
    for prefix in prefixes:
        model = on_one_line(prefix.model or "a model that it does not name")
        say(
            f"{on_one_line(prefix.path)} {prefix.id}: {model}, "
            f"{counted(prefix.n_tokens, 'token')}, {_mib(prefix.n_bytes)}"
        )
        form, arithmetic = on_one_line(prefix.kv_format or "?"), on_one_line(prefix.arithmetic or "?")
        say(f"  keys and values in {form}, arithmetic {arithmetic}")
    if not prefixes:
        note("nothing is kept there")


@app.command()
def verify(paths: PathsArgument, as_json: JsonOption = False) -> None:
    """Read every record and compare its digest.

    $ phasewise prefix verify kept
    $ phasewise prefix verify kept --json

    The exit code is 0 if all are whole, and 3 if any is damaged. A server
    reads past damaged ones anyway, and computes what they held.
    """
    from phasewise.workflows.prefix.kept import verify_prefixes

    checked = verify_prefixes(paths)
    if as_json:
        print_json({"checked": [prefix.to_json() for prefix in checked]})
    else:
        for prefix in checked:
            for name in prefix.damaged:
                say(f"damaged: {on_one_line(name)}")
            whole = counted(max(0, prefix.n_records - len(prefix.damaged)), "record")
            say(f"{on_one_line(prefix.path)}: {whole} whole, {len(prefix.damaged)} damaged")
    if any(prefix.damaged for prefix in checked):
        sys.exit(EXIT_DAMAGED)


@app.command()
def rm(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of serve --prefix-cache")],
    identity: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="only what list shows under this id"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what a folder keeps. A server that uses it keeps running.

    $ phasewise prefix rm kept
    $ phasewise prefix rm kept --id 0f3a
    """
    from phasewise.workflows.prefix.kept import remove_prefixes

    n_removed = remove_prefixes(path, identity)
    if as_json:
        print_json({"removed": n_removed})
    else:
        say(f"{counted(n_removed, 'file')} removed")


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):.1f} MiB"
