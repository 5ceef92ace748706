"""`phasewise bench kernels`: matrix products beside the machine's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from phasewise._options import option
from phasewise.cli.options import Form, WideOption
from phasewise.cli.present import note
from phasewise.cli.tables import low_limit_lines, show_rows, table_of_rows
from phasewise.workflows.bench.settings import KernelWish, counts

if TYPE_CHECKING:
    from phasewise.workflows.bench.kernels import KernelGrid

MAX_M = 1 << 16
MAX_SIDE = 1 << 20
"""The most rows, outputs or inputs of a product."""


def kernels(
    wish: KernelWish,
    output: Form = option("md", "form of the rows", "-o", "--output"),
    wide: WideOption = False,
) -> None:
    """Time matrix products beside the machine's limits.

    $ phasewise bench kernels --shape llama-3-8b --m 1,64
    $ phasewise bench kernels --format int4,int8 --shape 4096,4096

    Named shapes: smollm2-135m, llama-1.3b, llama-3-8b.
    """
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.bench.kernels import kernel_rows, schedules_of

    grid = _grid(wish)
    choose = schedules_of(wish.db, grid.cores, note)
    with user_lock(note).turn():
        rows = list(kernel_rows(grid, choose, note))
    shares = (share for row in rows for share in (row.peak_fraction, row.bandwidth_fraction))
    show_rows(output, rows, [table_of_rows(rows, wide=wide, form="github"), *low_limit_lines(shares)])


def _grid(wish: KernelWish) -> KernelGrid:
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan
    from phasewise.tuner.weights import cold_bytes, split_format
    from phasewise.workflows.bench.kernels import BITS, KernelGrid

    formats = [name.strip() for name in wish.formats.split(",")]
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
        cold_bytes=cold_bytes(machine),
    )


def _shapes(text: str) -> list[tuple[int, int]]:
    """Parse the shape `576,1536` (outputs, inputs), or look up the shapes of a named model."""
    from phasewise.workflows.bench.kernels import SHAPES

    if text in SHAPES:
        return list(SHAPES[text])
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and 1 <= int(part) <= MAX_SIDE for part in parts):
        raise typer.BadParameter(
            f"{text!r} is neither N,K (each 1 to {MAX_SIDE}) nor one of {', '.join(SHAPES)}"
        )
    return [(int(parts[0]), int(parts[1]))]
