"""`phasewise bench allreduce`: all-reduces over shared memory, beside plain copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from phasewise._rows import spread
from phasewise._words import percent, proven
from phasewise.cli import option_sets
from phasewise.cli.options import Form, WideOption
from phasewise.cli.present import note
from phasewise.cli.tables import RowTable, show_rows
from phasewise.tuner.timing import compare_rounds
from phasewise.workflows.bench.allreduce.compare import AllReduceRow, size_text
from phasewise.workflows.bench.allreduce.rank import COPY
from phasewise.workflows.bench.settings import AllReduceWish, counts

MAX_MESSAGE_BYTES = 1 << 30


@option_sets.spread
def allreduce(
    wish: AllReduceWish,
    output: Annotated[Form, typer.Option("-o", "--output", help="form of the rows")] = "md",
    wide: WideOption = False,
) -> None:
    """Time the all-reduces over shared memory beside plain copying by the same cores, in turns.

    $ phasewise bench allreduce --ranks 2,4
    $ phasewise bench allreduce --sizes 4K,1M -o csv

    One process per rank, pinned to a core of its own. Before each all-reduce every rank writes its message
    anew, which is not timed. GB/s: bytes of one message over the time. Copying: every rank copies one
    message.
    """
    from phasewise.topology import read_machine
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.tuner.plans import default_plan
    from phasewise.workflows.bench.allreduce.compare import AllReduceGrid, all_reduce_rows

    cores = default_plan(read_machine(), "decode", wish.threads).ranks[0].cores
    grid = AllReduceGrid(
        cores, _rank_counts(wish.ranks, len(cores)), _sizes(wish.sizes), _kinds(wish.kinds), wish.rounds
    )
    with user_lock(note).turn():
        rows = list(all_reduce_rows(grid, report=note))
    show_rows(output, rows, [table_of(rows, wide=wide)])


def _rank_counts(text: str, n_cores: int) -> Sequence[int]:
    values = counts(text)
    if not values or max(values) > n_cores:
        raise typer.BadParameter(
            f"--ranks {text!r}: each rank has a core of its own, and there are {n_cores}"
        )
    return values


def _sizes(text: str) -> list[int]:
    """`4K,1M` as bytes, each a multiple of 4. Raises BadParameter for anything else."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20}
    sizes = []
    for part in text.upper().split(","):
        digits = part.strip().rstrip("KM")
        unit = units.get(part.strip()[len(digits) :])
        size = int(digits) * unit if unit and digits.isdecimal() else 0
        if size % 4 or not 4 <= size <= MAX_MESSAGE_BYTES:
            most = f"{MAX_MESSAGE_BYTES >> 20}M"
            raise typer.BadParameter(
                f"--sizes: {part.strip()!r} is no multiple of 4 bytes, such as 4K, up to {most}"
            )
        sizes.append(size)
    return sizes


def _kinds(text: str) -> list[str]:
    from phasewise.cython_kernels import _native

    kinds = [kind.strip() for kind in text.split(",")]
    if not set(kinds) <= set(_native.ALL_REDUCE_KINDS):
        raise typer.BadParameter(f"--kinds {text!r} is not a list of {', '.join(_native.ALL_REDUCE_KINDS)}")
    return list(dict.fromkeys(kinds))


def table_of(rows: Sequence[AllReduceRow], *, wide: bool) -> RowTable:
    """A row for each size: the first system, and every other one's time over its."""
    points = dict.fromkeys((row.ranks, row.message_bytes) for row in rows)
    table = RowTable(
        [_cells([row for row in rows if (row.ranks, row.message_bytes) == point]) for point in points],
        form="github",
    )
    return table if wide else table.narrow([*(name for name in table.names if name not in LAST), *LAST])


LAST = ("GB/s", "spread")
"""Columns that a narrow table does without."""


def _over(row: AllReduceRow, first: AllReduceRow) -> str:
    rounds = compare_rounds(row.samples_ns, first.samples_ns)
    return proven(rounds.gain, rounds.gain_low, rounds.gain_high)


def _cells(systems: Sequence[AllReduceRow]) -> dict[str, str]:
    first = systems[0]
    return {
        "ranks": str(first.ranks),
        "bytes": size_text(first.message_bytes),
        f"{first.system}, us": f"{first.median_ns / 1e3:.2f}",
        "spread": percent(spread(first.samples_ns)),
        "GB/s": f"{first.gbps:.2f}",
        "of copying": percent(first.copy_fraction),
        **{row.system: _over(row, first) for row in systems[1:] if row.system != COPY},
    }
