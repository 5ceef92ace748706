"""`phasewise bench kernels`: matrix products, beside the machine's limits and beside peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise._words import counted
from phasewise.cli.option_sets import spread
from phasewise.cli.options import Form, WideOption
from phasewise.cli.present import check_target, note, owns_stdout, say, write_target
from phasewise.cli.tables import RowTable, as_csv, as_json, low_limit_lines, scalar_names, show, table_of_rows
from phasewise.workflows.bench.settings import KernelWish, counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phasewise.workflows.bench.kernel_rows import KernelRow
    from phasewise.workflows.bench.kernels import KernelGrid
    from phasewise.workflows.line_chart import Panel

MAX_M = 1 << 16
MAX_SIDE = 1 << 20
"""Largest rows, and outputs or inputs, of a product."""


@spread
def kernels(
    wish: KernelWish,
    output: Annotated[Form, typer.Option("-o", "--output", help="form of the rows")] = "md",
    wide: WideOption = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="draw throughput over m, with the limit; -: stdout"),
    ] = None,
) -> None:
    """Time matrix products beside the machine's limits and beside every peer that is installed, in turns.

    $ phasewise bench kernels --shape llama-3-8b --m 1,64
    $ phasewise bench kernels --format int4,int8 --shape 4096,4096 --peers none

    Peers run under the interpreter that PHASEWISE_PEERS_PYTHON names, or this one. Named shapes:
    smollm2-135m, llama-1.3b, llama-3-8b. A run with --rows may be killed and started again; it
    prints all rows of the grid.
    """
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.bench.kernel_rows import PointKey, RowFile
    from phasewise.workflows.bench.kernels import kernel_rows, schedules_of
    from phasewise.workflows.bench.peers.processes import opened_peers

    grid = _grid(wish)
    check_target(plot)
    try:
        file = None if wish.kept is None else RowFile(wish.kept)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--rows: {error}") from error
    row_by_key: dict[PointKey, KernelRow] = {row.key: row for row in (file.rows if file else ())}
    if not row_by_key.keys() >= set(grid.points()):
        choose = schedules_of(wish.db, grid.cores, note)
        with user_lock(note).turn(), opened_peers(_peer_names(wish.peers), grid.cores, note) as opened:
            for row in kernel_rows(grid, opened, choose, row_by_key.keys(), note):
                if file is not None:
                    file.add(row)
                row_by_key = {**row_by_key, row.key: row}
    rows = [row_by_key[point] for point in grid.points()]
    if not owns_stdout(plot):
        if output == "md":
            show(*table_of(rows, wide=wide))
        else:
            say(csv_of(rows) if output == "csv" else as_json(rows), end="")
    if plot is not None:
        write_target(plot, draw_rows(rows))


def _with_densities(formats: str, densities: str) -> list[str]:
    """Every format at every density: 1 is the dense weight, less the weight stored sparse."""
    from phasewise.tuner.weights import sparse_format

    try:
        shares = [float(text) for text in densities.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--density {densities}: shares such as 1,.5 expected") from None
    names = [name.strip() for name in formats.split(",")]
    return [name if share == 1 else sparse_format(name, share) for name in names for share in shares]


def _grid(wish: KernelWish) -> KernelGrid:
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan
    from phasewise.tuner.weights import cold_bytes, split_format
    from phasewise.workflows.bench.kernels import BITS, KernelGrid

    formats = _with_densities(wish.formats, wish.density)
    if not {split_format(name)[0] for name in formats} <= set(BITS):
        raise typer.BadParameter(f"{','.join(formats)!r} is not a list of formats: {', '.join(BITS)}")
    rows = counts(wish.ms)
    if not rows or max(rows) > MAX_M:
        raise typer.BadParameter(f"--m takes numbers of rows from 1 to {MAX_M}")
    machine = read_machine()
    return KernelGrid(
        formats=formats,
        shapes=[shape for text in wish.shapes or ["smollm2-135m"] for shape in _shapes(text)],
        ms=rows,
        cores=default_plan(machine, "decode", wish.threads).ranks[0].cores,
        rounds=wish.rounds,
        cold_bytes=cold_bytes(machine) if wish.cold_mib is None else wish.cold_mib << 20,
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


def csv_of(rows: Sequence[KernelRow]) -> str:
    """Scalars, the schedule in one cell, and a column of nanoseconds for every peer of the run."""
    from phasewise.workflows.bench.kernel_rows import schedule_text

    peers, scalars = _peers_of(rows), scalar_names(type(rows[0]))
    lines = (
        [
            *(getattr(row, name) for name in scalars),
            schedule_text(row.schedule),
            *(row.peers.get(peer, "") for peer in peers),
        ]
        for row in rows
    )
    return as_csv([*scalars, "schedule", *(f"{peer}_ns" for peer in peers)], lines)


def table_of(rows: Sequence[KernelRow], *, wide: bool = False) -> Iterator[str | RowTable]:
    """A table of the points, peers as the ratio of our speed to theirs, and a table of the summaries."""
    from phasewise.workflows.bench.kernel_rows import summarise

    yield table_of_rows(rows, wide=wide, form="github")
    yield from low_limit_lines(share for row in rows for share in (row.peak_fraction, row.bandwidth_fraction))
    if _peers_of(rows):
        yield ""
        yield table_of_rows(summarise(rows), form="github")


def draw_rows(rows: Sequence[KernelRow]) -> str:
    """Throughput over m as SVG: a panel for each format and shape, a line for each system, and the limit."""
    from phasewise.workflows.line_chart import Chart, draw_chart

    groups: dict[tuple[str, int, int], list[KernelRow]] = {}
    for row in sorted(rows, key=lambda row: row.m):
        groups.setdefault((row.format, row.n, row.k), []).append(row)
    first = rows[0]
    return draw_chart(
        Chart(
            title=f"y[m, n] = x[m, k] W[n, k]^T on {counted(first.threads, 'thread')}; weights from memory",
            caption=first.core_signature,
            x_name="rows m",
            y_name="GFLOP/s",
            limit_name="limit: arithmetic, or reading the weights",
            emphasised="phasewise",
            panels=[_panel(group) for group in groups.values()],
        )
    )


def _panel(rows: Sequence[KernelRow]) -> Panel:
    from phasewise.workflows.line_chart import Panel

    def flops(row: KernelRow) -> float:
        return 2.0 * row.m * row.n * row.k

    def limit(row: KernelRow) -> float:
        read_s = row.weight_bytes / row.read_bytes_per_s
        return min(row.peak_flops_per_s, flops(row) / read_s) / 1e9

    lines = {
        "phasewise": [(row.m, row.gflops) for row in rows],
        **{
            peer: [(row.m, flops(row) / row.peers[peer]) for row in rows if peer in row.peers]
            for peer in _peers_of(rows)
        },
    }
    return Panel(f"{rows[0].format}, {rows[0].n}x{rows[0].k}", lines, [(row.m, limit(row)) for row in rows])


def _peers_of(rows: Sequence[KernelRow]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in row.peers))
