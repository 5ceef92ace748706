"""`phasewise bench machine`: the measured limits of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise._words import counted, percent
from phasewise.cli.options import JsonOption, ThreadsOption
from phasewise.cli.present import note, print_json, say
from phasewise.cli.tables import RowTable, show

if TYPE_CHECKING:
    from phasewise.tuner.machine_limits import MachineLimits, PieceReads


def machine(threads: ThreadsOption = None, as_json: JsonOption = False) -> None:
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
    if as_json:
        print_json(
            {
                "signature": {"core": core_signature(here), "placement": placement_signature(here, cores)},
                "limits": [_limit_fields(limit) for limit in limits],
                "reads_in_pieces": [_piece_fields(reads) for reads in pieces],
            }
        )
    else:
        _print_limits(limits)
        say("")
        _print_pieces(pieces)


def _limit_fields(limit: MachineLimits) -> dict[str, object]:
    return {"n_cores": len(limit.cores), **vars(limit)}


def _piece_fields(reads: PieceReads) -> dict[str, object]:
    return {**vars(reads), "share": reads.share}


def _print_pieces(pieces: list[PieceReads]) -> None:
    rows = [
        [
            counted(reads.piece_bytes, "byte"),
            f"{reads.in_order_bytes_per_s / 1e9:.1f} GB/s",
            f"{reads.scattered_bytes_per_s / 1e9:.1f} GB/s",
            percent(reads.share),
        ]
        for reads in pieces
    ]
    _show(rows, ["read in pieces of", "in order", "scattered", "share"])


def _print_limits(limits: list[MachineLimits]) -> None:
    rows: list[list[str]] = [
        [f"{kind} multiply-add", *(f"{limit.peak_flops[kind] / 1e9:.0f} G/s" for limit in limits)]
        for kind in limits[0].peak_flops
    ]
    size = f"{limits[0].read_buffer_bytes >> 20} MiB"
    rows.append([f"read {size}", *(f"{limit.read_bytes_per_s / 1e9:.1f} GB/s" for limit in limits)])
    headers = [f"limit ({limits[0].isa})", *(counted(len(limit.cores), "core") for limit in limits)]
    _show(rows, headers)


def _show(rows: list[list[str]], headers: list[str]) -> None:
    show(RowTable([dict(zip(headers, row, strict=True)) for row in rows], headers[:1], form="github"))
