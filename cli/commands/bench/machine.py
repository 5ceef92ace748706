"""`phasewise bench machine`: the measured limits of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise._words import counted, percent
from phasewise.cli.options import JsonOption
from phasewise.cli.present import note
from phasewise.cli.tables import RowTable, present, table_of
from phasewise.workflows.options import THREADS

if TYPE_CHECKING:
    from phasewise.tuner.machine_limits import MachineLimits, PieceReads


def machine(threads: int | None = THREADS(None), as_json: JsonOption = False) -> None:
    """Measure this machine's limits: peak multiply rates and read bandwidth, on one core and on all.

    $ phasewise bench machine
    $ phasewise bench machine --threads 2 --json

    Then reads of memory in pieces, scattered beside in order, on all: where
    scattered ones are nearly as fast, pages of keys and values cost nothing
    (serve: kv_policy = "paged").
    """
    from phasewise.topology import core_signature, placement_signature, read_machine
    from phasewise.tuner.machine_limits import PIECES, measure_limits, read_in_pieces
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.tuner.plans import default_plan

    here = read_machine()
    cores = default_plan(here, "decode", threads).ranks[0].cores
    groups = [cores[:1]] if len(cores) == 1 else [cores[:1], cores]
    limits = []
    with user_lock(note).turn():
        for group in groups:
            note(f"measuring {counted(len(group), 'core')} ...")
            limits.append(measure_limits(group))
        note("measuring reads in pieces ...")
        pieces = [read_in_pieces(cores, piece_bytes) for piece_bytes in PIECES]
    fields = {
        "signature": {"core": core_signature(here), "placement": placement_signature(here, cores)},
        "limits": [{"n_cores": len(limit.cores), **vars(limit)} for limit in limits],
        "reads_in_pieces": [{**vars(reads), "share": reads.share} for reads in pieces],
    }
    present(as_json, fields, [_limits_table(limits), "", _pieces_table(pieces)])


def _pieces_table(pieces: list[PieceReads]) -> RowTable:
    rows = [
        [
            counted(reads.piece_bytes, "byte"),
            f"{reads.in_order_bytes_per_s / 1e9:.1f} GB/s",
            f"{reads.scattered_bytes_per_s / 1e9:.1f} GB/s",
            percent(reads.share),
        ]
        for reads in pieces
    ]
    return table_of(rows, ["read in pieces of", "in order", "scattered", "share"], form="github")


def _limits_table(limits: list[MachineLimits]) -> RowTable:
    rows: list[list[str]] = [
        [f"{kind} multiply-add", *(f"{limit.peak_flops[kind] / 1e9:.0f} G/s" for limit in limits)]
        for kind in limits[0].peak_flops
    ]
    size = f"{limits[0].read_buffer_bytes >> 20} MiB"
    rows.append([f"read {size}", *(f"{limit.read_bytes_per_s / 1e9:.1f} GB/s" for limit in limits)])
    headers = [f"limit ({limits[0].isa})", *(counted(len(limit.cores), "core") for limit in limits)]
    return table_of(rows, headers, form="github")
