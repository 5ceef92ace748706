"""`phasewise kernels`: raise a hand-written C kernel, lower it to instruction sets, check it, emit C."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from phasewise._options import REQUIRED, argument, option, refuse_unused
from phasewise._words import counted
from phasewise.cli.command_app import CommandApp
from phasewise.cli.options import OUT, SET, JsonOption
from phasewise.cli.present import note, say, write_target
from phasewise.cli.tables import present
from phasewise.workflows.options import DB, DEFINE, INCLUDE

HELP = """Kernels written in C: raise, lower, check, emit.

$ phasewise kernels raise dot.c --function dot_f32 -o dot.kir
$ phasewise kernels check dot.kir --against dot.c"""

app = CommandApp(help=HELP)

KernelArgument = Annotated[
    Path, typer.Argument(metavar="KERNEL.kir", help="a kernel's text, as `raise` writes it")
]


@app.command("raise")
def raise_(
    source: Path = argument(REQUIRED, "C file with intrinsics", "FILE.c"),
    function: str = option(REQUIRED, "the function to raise, with all that it calls"),
    output: Path | None = OUT(None),
    isa: str | None = option(None, "instruction set of the C file [default: the widest that it names]"),
    include: list[Path] | None = INCLUDE(None),
    define: list[str] | None = DEFINE(None),
    tunable: bool = option(False, "add parameters to the loops that may have them"),
    reassociate: bool = option(False, "let sums of floats change their order, within a bound"),
) -> None:
    """Raise a C function to the text of the high level.

    $ phasewise kernels raise dot.c --function dot_f32
    $ phasewise kernels raise dot.c --function dot_f32 --tunable -o dot.kir

    What is outside the supported C is refused with its file, line and name. Comment lines in FILE.c such as
    `@arg x count=n low=-1 high=1` describe the arguments to `check` and `tune-kernels`.
    """
    from phasewise.ir.build import with_parameters
    from phasewise.ir.raising.raising import raise_file

    text = raise_file(source, function, isa, include or [], define or [], reassociate)
    _put(with_parameters(text, str(source)) if tunable else text, output)


@app.command("lower")
def lower(
    kernel: KernelArgument,
    isa: str = option(REQUIRED, "portable, avx2, avx512, avx512_vnni, neon or neon_dotprod"),
    output: Path | None = OUT(None),
    settings: list[str] | None = SET(None),
) -> None:
    """Lower a kernel's text to C for an instruction set.

    $ phasewise kernels lower dot.kir --isa avx512
    $ phasewise kernels lower dot.kir --isa neon --set UNROLL=2 -o dot.c
    """
    from phasewise.workflows.user_kernels.files import lowered

    _put(lowered(kernel, isa, parse_settings(settings)), output)


@app.command("check")
def check(
    kernel: KernelArgument,
    against: Path = option(REQUIRED, "the original, with a function of the same name", metavar="FILE.c"),
    isa: list[str] | None = option(
        None, "instruction set to check; may be repeated [default: portable, avx2, avx512, neon]"
    ),
    cases: int = option(1000, "calls for each instruction set", min=1, max=1_000_000),
    settings: list[str] | None = SET(None),
    include: list[Path] | None = INCLUDE(None),
    define: list[str] | None = DEFINE(None),
    as_json: JsonOption = False,
) -> None:
    """Compare a kernel's results with its original's, on drawn arguments.

    $ phasewise kernels check dot.kir --against dot.c
    $ phasewise kernels check dot.kir --against dot.c --isa avx2 --cases 100

    Each argument lies between two pages of memory that no access survives.
    Bits must be equal; where the text says `reassociate()`, differences
    must stay below the bound that is printed. Everything runs in processes
    with limits. NEON runs under qemu-aarch64 where this machine is no Arm.
    """
    from phasewise.cli.commands.kernels.text import checked_fields, checked_text
    from phasewise.workflows.user_kernels.files import checked

    isas = isa or ["portable", "avx2", "avx512", "neon"]
    outcomes = checked(kernel, against, isas, cases, parse_settings(settings), include or [], define or [])
    present(as_json, {"targets": list(map(checked_fields, outcomes))}, map(checked_text, outcomes))


@app.command("emit")
def emit(
    kernel: KernelArgument,
    output: Path | None = OUT(None),
    header: Path | None = option(None, "write a header too, which the C file includes", metavar="FILE.h"),
    against: Path | None = option(
        None, "the C file it was tuned against, where that is in use", metavar="FILE.c"
    ),
    include: list[Path] | None = INCLUDE(None),
    define: list[str] | None = DEFINE(None),
    db: str | None = DB(None),
) -> None:
    """Write one C file with the tuned variants and a choice among them by shape. It builds without phasewise.

    $ phasewise kernels emit dot.kir -o dot.c --header dot.h
    $ phasewise kernels emit dot.kir --against original.c

    The parameters come from the database, where `tune-kernels --kernel` put them for this very text and
    machine.
    """
    if against is None:
        of_c = {"include": include, "define": define}
        refuse_unused("without --against", [name for name, given in of_c.items() if given])
    from phasewise.kerneldb.store import open_store
    from phasewise.topology import core_signature, read_machine
    from phasewise.workflows.user_kernels.files import emit as emit_files

    with open_store(db, note) as store:
        text, header_text, n_shapes = emit_files(
            kernel, store, core_signature(read_machine()), header.name if header else None, against,
            include or [], define or [],
        )  # fmt: skip
    if header:
        write_target(header, header_text)
    _put(text, output)
    note(counted(n_shapes, "tuned shape"))


@app.command("show")
def show(
    name: str | None = argument(None, "a kernel's name or its key [default: list all kernels]", "NAME"),
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """List the kernels that the database has parameters for; of NAME the parameters in use and their gain.

    $ phasewise kernels show
    $ phasewise kernels show dot_f32
    """
    from phasewise.cli.commands.kernels.text import listed_fields, listed_text, shown_fields, shown_text
    from phasewise.ir.errors import UserKernelError
    from phasewise.kerneldb.records import UserPromotion
    from phasewise.kerneldb.store import open_store

    with open_store(db, note) as store:
        promotions = [
            promotion
            for promotion in store.rows(UserPromotion, verified=True)
            if name in (None, promotion.problem.name, promotion.problem.kernel_abi)
        ]
    if name is None:
        rows = listed_fields(promotions)
        present(as_json, {"kernels": rows}, [listed_text(rows)])
    elif not promotions:
        raise UserKernelError(
            f"the database has no parameters for a kernel `{name}`; see `phasewise kernels show`"
        )
    else:
        present(as_json, {"shapes": shown_fields(promotions)}, [shown_text(promotions)])


def parse_settings(settings: list[str] | None) -> dict[str, int]:
    """Parse settings such as `UNROLL=4` into values by name; a usage error for other text."""
    values = {}
    for text in settings or []:
        match = re.fullmatch(r"([A-Z][A-Z0-9_]*)=(-?\d{1,9})", text)
        if match is None:
            raise typer.BadParameter(f"a parameter is set like UNROLL=4, not {text!r:.40}")
        values[match[1]] = int(match[2])
    return values


def _put(text: str, output: Path | None) -> None:
    if output is None:
        say(text, end="")
    else:
        write_target(output, text)
