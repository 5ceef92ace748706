"""`phasewise prefix`: beginnings of prompts that are computed once, in packs and in folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from phasewise._words import counted
from phasewise.cli.command_app import CommandApp
from phasewise.cli.commands.serve import ToolFormatName
from phasewise.cli.options import (
    ArithmeticOption,
    DbOption,
    FormatOption,
    JsonOption,
    KvFormatOption,
    ModelArgument,
    SparseOption,
    ThreadsOption,
)
from phasewise.cli.present import note, on_one_line, print_json, say

HELP = """Compute the beginning of prompts once, and see what a server keeps of them.

$ phasewise prefix pack model.gguf --system 'Be brief.' -o brief.pack
$ phasewise prefix list brief.pack"""

app = CommandApp(help=HELP)

EXIT_DAMAGED = 3

PathsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="PATH", help="packs, and folders of serve --prefix-cache"),
]


@app.command()
def pack(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="the pack")],
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="system prompt that conversations begin with")
    ] = None,
    system_file: Annotated[Path | None, typer.Option(metavar="FILE", help="the same, in a file")] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON list of tools, as requests have them")
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a beginning without a chat template, as it is")
    ] = None,
    weight_format: FormatOption = "native",
    sparse: SparseOption = "auto",
    arithmetic: ArithmeticOption = "tuned",
    kv_format: KvFormatOption = "auto",
    context_tokens: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, metavar="N", help="as the server has it; it matters to LongRoPE alone"
        ),
    ] = None,
    tool_format: Annotated[
        ToolFormatName, typer.Option(help="how the model writes tool calls, as the server has it")
    ] = "auto",
    threads: ThreadsOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a system prompt with its tools once, for serve --prefix-pack.

    $ phasewise prefix pack model.gguf --system 'Be brief.' -o brief.pack
    $ phasewise prefix pack model.gguf --system-file rules.txt -o rules.pack

    A server takes the pack where it would compute the same bits: the same
    model, weight format, KV format and arithmetic, on any CPU whose
    arithmetic is that (docs/arithmetic.md). A reader of the pack can
    tell the prompt from it.
    """
    from phasewise.workflows.opening.open_model import Weights
    from phasewise.workflows.prefix.pack import Beginning, PackOptions, pack_prefix

    options = PackOptions(
        Weights(weight_format, sparse, arithmetic=arithmetic),
        kv_format,
        context_tokens,
        tool_format,
        threads=threads,
        db=db,
    )
    packed = pack_prefix(model, Beginning(system, system_file, tools, text_file), output, options, note)
    if as_json:
        print_json(packed.to_json())
        return
    say(f"{packed.path}: {counted(packed.n_tokens, 'token')} of {packed.model}, {_mib(packed.n_bytes)}")
    say(f"keys and values in {packed.kv_format}, arithmetic {packed.arithmetic}")


@app.command("list")
def list_(paths: PathsArgument, as_json: JsonOption = False) -> None:
    """Say what packs and folders hold, by model and arithmetic.

    $ phasewise prefix list brief.pack
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
    $ phasewise prefix verify brief.pack kept

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
    path: Annotated[Path, typer.Argument(metavar="PATH", help="a pack, or a folder of serve --prefix-cache")],
    identity: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="of a folder, only what list shows under this id"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a pack, or what a folder keeps. A server that uses it keeps running.

    $ phasewise prefix rm brief.pack
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
