"""`phasewise bench kernels`: matrix products, beside the machine's limits and beside peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.commands.bench.options import Form, WideOption
from phasewise.cli.options import DbOption, ThreadsOption
from phasewise.cli.present import check_target, note, owns_stdout, say, write_target
from phasewise.workflows.bench.run_settings import counts

if TYPE_CHECKING:
    from phasewise.workflows.bench.kernels import KernelGrid

MAX_M = 1 << 16
MAX_SIDE = 1 << 20
"""Largest rows, and outputs or inputs, of a product."""


FormatsOption = Annotated[str, typer.Option("--format", help="weight formats, e.g. f32,bf16,int8,int8c,int4")]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="N,K|NAME",
        help="outputs and inputs of a product, or a model whose layers to time [repeatable]",
    ),
]
PeersOption = Annotated[
    str,
    typer.Option(
        "--peers", metavar="auto|none|LIST", help="any of torch, mkl, openblas, openvino, ggml, tvm"
    ),
]
RoundsOption = Annotated[
    int, typer.Option("-r", "--rounds", min=1, max=1000, help="timed turns of each product")
]
ColdMibOption = Annotated[
    int | None,
    typer.Option(
        "--cold-mib",
        min=1,
        max=1 << 16,
        help="MiB of weights that are multiplied in turn, so that none stays in a cache [default: twice"
        " the last-level cache]",
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.svg", help="draw throughput over m, with the limit; -: stdout"),
]
KeptOption = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="FILE.jsonl",
        help="append each row to this file as it is measured, and measure only rows that it lacks",
    ),
]
DensityOption = Annotated[
    str,
    typer.Option(metavar="SHARES", help="shares of weights that are not zero; below 1 stored sparse"),
]


def kernels(
    formats: FormatsOption = "bf16",
    shapes: ShapesOption = None,
    ms: Annotated[str, typer.Option("--m", help="rows of activations")] = "1,8,64",
    threads: ThreadsOption = None,
    peers: PeersOption = "auto",
    rounds: RoundsOption = 7,
    cold_mib: ColdMibOption = None,
    output: Annotated[Form, typer.Option("-o", "--output", help="form of the rows")] = "md",
    wide: WideOption = False,
    plot: PlotOption = None,
    kept: KeptOption = None,
    density: DensityOption = "1",
    db: DbOption = None,
) -> None:
    """Time matrix products beside the machine's limits and beside every peer that is installed, in turns.

    $ phasewise bench kernels --shape llama-3-8b --m 1,64
    $ phasewise bench kernels --format int4,int8 --shape 4096,4096 --peers none

    Peers run under the interpreter that PHASEWISE_PEERS_PYTHON names, or this one. Named shapes:
    smollm2-135m, llama-1.3b, llama-3-8b. A run with --rows may be killed and started again; it
    prints all rows of the grid.
    """
    from phasewise.cli.commands.bench.kernels_text import as_csv, draw_rows, table_of
    from phasewise.cli.tables import as_json, show
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.bench.kernel_rows import KernelRow, PointKey, RowFile
    from phasewise.workflows.bench.kernels import kernel_rows, schedules_of
    from phasewise.workflows.bench.peers.processes import opened_peers

    grid = _grid(_with_densities(formats, density), shapes or ["smollm2-135m"], ms, threads, rounds, cold_mib)
    check_target(plot)
    try:
        file = None if kept is None else RowFile(kept)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--rows: {error}") from error
    row_by_key: dict[PointKey, KernelRow] = {row.key: row for row in (file.rows if file else ())}
    if not row_by_key.keys() >= set(grid.points()):
        with user_lock(note).turn(), opened_peers(_peer_names(peers), grid.cores, note) as opened:
            for row in kernel_rows(grid, opened, schedules_of(db, grid.cores, note), row_by_key.keys(), note):
                if file is not None:
                    file.add(row)
                row_by_key = {**row_by_key, row.key: row}
    rows = [row_by_key[point] for point in grid.points()]
    if not owns_stdout(plot):
        if output == "md":
            show(*table_of(rows, wide=wide))
        else:
            say(as_csv(rows) if output == "csv" else as_json(rows), end="")
    if plot is not None:
        write_target(plot, draw_rows(rows))


def _with_densities(formats: str, densities: str) -> str:
    """Every format at every density: 1 is the dense weight, less the weight stored sparse."""
    from phasewise.tuner.weights import sparse_format

    try:
        shares = [float(text) for text in densities.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--density {densities}: shares such as 1,.5 expected") from None
    names = [name.strip() for name in formats.split(",")]
    return ",".join(name if share == 1 else sparse_format(name, share) for name in names for share in shares)


def _grid(
    formats: str, shapes: list[str], ms: str, threads: int | None, rounds: int, cold_mib: int | None
) -> KernelGrid:
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan
    from phasewise.tuner.weights import cold_bytes, split_format
    from phasewise.workflows.bench.kernels import BITS, KernelGrid

    names = [name.strip() for name in formats.split(",")]
    if not {split_format(name)[0] for name in names} <= set(BITS):
        raise typer.BadParameter(f"{formats!r} is not a list of formats: {', '.join(BITS)}")
    rows = counts(ms)
    if not rows or max(rows) > MAX_M:
        raise typer.BadParameter(f"--m takes numbers of rows from 1 to {MAX_M}")
    machine = read_machine()
    return KernelGrid(
        formats=names,
        shapes=[shape for text in shapes for shape in _shapes(text)],
        ms=rows,
        cores=default_plan(machine, "decode", threads).ranks[0].cores,
        rounds=rounds,
        cold_bytes=cold_bytes(machine) if cold_mib is None else cold_mib << 20,
    )


def _shapes(text: str) -> list[tuple[int, int]]:
    """`576,1536`, or the shapes of a model by its name."""
    from phasewise.workflows.bench.kernels import SHAPES

    if text in SHAPES:
        return list(SHAPES[text])
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and 1 <= int(part) <= MAX_SIDE for part in parts):
        raise typer.BadParameter(
            f"{text!r} is neither N,K (each 1 to {MAX_SIDE}) nor one of {', '.join(SHAPES)}"
        )
    return [(int(parts[0]), int(parts[1]))]


def _peer_names(text: str) -> list[str] | None:
    """The names, or None for all installed peers."""
    from phasewise.workflows.bench.peers.processes import NAMES

    if text == "auto":
        return None
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    if not set(names) <= set(NAMES):
        raise typer.BadParameter(f"{text!r} is neither auto nor none nor a list of {', '.join(NAMES)}")
    return names
