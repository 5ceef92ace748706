"""`phasewise bench allreduce`: all-reduces over shared memory, beside plain copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from phasewise.cli.commands.bench.options import Table, WideOption, counts
from phasewise.cli.options import ThreadsOption
from phasewise.cli.present import note, say

MAX_MESSAGE_BYTES = 1 << 30


def allreduce(
    ranks: Annotated[str, typer.Option("--ranks", help="numbers of ranks, one core each")] = "2",
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="LIST", help="bytes of a message, e.g. 4K,1M")
    ] = "1K,4K,16K,64K,256K,1M,4M,16M",
    kinds: Annotated[
        str,
        typer.Option("--kinds", help="algorithms to time; the others are compared with the first"),
    ] = "rank-shifted,master-copies,ring",
    threads: ThreadsOption = None,
    rounds: Annotated[
        int, typer.Option("-r", "--rounds", min=1, max=1000, help="timed turns of each algorithm and size")
    ] = 15,
    output: Annotated[Table, typer.Option("-o", "--output", help="form of the rows")] = "md",
    wide: WideOption = False,
) -> None:
    """Time the all-reduces over shared memory beside plain copying by the same cores, in turns.

    $ phasewise bench allreduce --ranks 2,4
    $ phasewise bench allreduce --sizes 4K,1M -o csv

    One process per rank, pinned to a core of its own. Before each all-reduce every rank writes its message
    anew, which is not timed. GB/s: bytes of one message over the time. Copying: every rank copies one
    message.
    """
    from phasewise.cli.commands.bench.allreduce_text import FORMATS
    from phasewise.cli.row_forms import written
    from phasewise.topology import read_machine
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.tuner.plans import default_plan
    from phasewise.workflows.bench.allreduce.compare import AllReduceGrid, all_reduce_rows

    cores = default_plan(read_machine(), "decode", threads).ranks[0].cores
    grid = AllReduceGrid(cores, _rank_counts(ranks, len(cores)), _sizes(sizes), _kinds(kinds), rounds)
    with user_lock(note).turn():
        rows = list(all_reduce_rows(grid, report=note))
    say(written(FORMATS, output, rows, wide=wide), end="")


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
