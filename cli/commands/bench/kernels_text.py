"""The rows of `phasewise bench kernels` as CSV, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phasewise._words import counted, percent, proven
from phasewise.cli import tables
from phasewise.cli.tables import RowTable, low_limit_lines
from phasewise.workflows.bench.kernel_rows import KernelRow, summarise, summary_fields
from phasewise.workflows.line_chart import Chart, Panel, draw_chart


def as_csv(rows: Sequence[KernelRow]) -> str:
    """Scalars, the schedule in one cell, and a column of nanoseconds for every peer of the run."""
    peers = _peer_names(rows)
    scalars = tables.scalar_names(KernelRow)
    lines = (
        [
            *(getattr(row, name) for name in scalars),
            schedule_text(row.schedule),
            *(row.peers.get(peer, "") for peer in peers),
        ]
        for row in rows
    )
    return tables.as_csv([*scalars, "schedule", *(f"{peer}_ns" for peer in peers)], lines)


CORE = ("format", "n x k", "m", "us", "GFLOP/s", "peak", "bandwidth")


def table_of(rows: Sequence[KernelRow], *, wide: bool = False) -> Iterator[str | RowTable]:
    """A table of the points, peers as the ratio of our speed to theirs, and a table of the summaries."""
    peers = _peer_names(rows)
    table = RowTable([_cells(row, peers) for row in rows], ("format", "schedule"), form="github")
    yield table if wide else table.narrow((*CORE, *peers))
    yield from low_limit_lines(share for row in rows for share in (row.peak_fraction, row.bandwidth_fraction))
    if peers:
        yield ""
        yield summary_table(rows)


def summary_table(rows: Sequence[KernelRow]) -> RowTable:
    """The summary of the rows by format."""
    summaries = [summary_fields(summary) for summary in summarise(rows)]
    return RowTable(summaries, ("format", "worst point"), form="github")


def schedule_text(schedule: Mapping[str, Any]) -> str:
    """`4x48 block 64x96x576 grid 1x2x1 nm int8_dot`; k parts and prefetch where there are any."""
    s = schedule
    parts = [
        f"{s['mr']}x{16 * s['panels']}",
        f"block {s['block_m']}x{s['block_n']}x{s['block_k']}",
        f"grid {s['threads_m']}x{s['threads_n']}x{s['threads_k']}",
        s["loop_order"],
        s["compute_path"],
        *([f"{s['k_parts']} k parts"] if s["k_parts"] > 1 else []),
        *([f"prefetch {s['prefetch_bytes']}"] if s["prefetch_bytes"] else []),
    ]
    return " ".join(parts)


def draw_rows(rows: Sequence[KernelRow]) -> str:
    """Throughput over m as SVG: a panel for each format and shape, a line for each system, and the limit."""
    groups = {key: [row for row in rows if _group(row) == key] for key in dict.fromkeys(map(_group, rows))}
    first = rows[0]
    return draw_chart(
        Chart(
            title=f"y[m, n] = x[m, k] W[n, k]^T on {count_threads(first.threads)}; weights from memory",
            caption=first.core_signature,
            x_name="rows m",
            y_name="GFLOP/s",
            limit_name="limit: arithmetic, or reading the weights",
            emphasised="phasewise",
            panels=[_panel(group) for group in groups.values()],
        )
    )


def _group(row: KernelRow) -> tuple[str, int, int]:
    return row.format, row.n, row.k


def _panel(rows: Sequence[KernelRow]) -> Panel:
    ordered = sorted(rows, key=lambda row: row.m)
    own = [(row.m, row.gflops) for row in ordered]
    others = {
        peer: [(row.m, _flops(row) / row.peers[peer]) for row in ordered if peer in row.peers]
        for peer in _peer_names(ordered)
    }
    limit = [(row.m, _limit_gflops(row)) for row in ordered]
    return Panel(f"{rows[0].format}, {rows[0].n}x{rows[0].k}", {"phasewise": own, **others}, limit)


def _flops(row: KernelRow) -> float:
    return 2.0 * row.m * row.n * row.k


def _limit_gflops(row: KernelRow) -> float:
    read_s = row.weight_bytes / row.read_bytes_per_s
    return min(row.peak_flops_per_s, _flops(row) / read_s) / 1e9


def count_threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{counted(count, 'thread')}"


def _peer_names(rows: Sequence[KernelRow]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in row.peers))


def _over(row: KernelRow, peer: str) -> str:
    ratio = row.over(peer)
    return proven(ratio.gain, ratio.low, ratio.high)


def _cells(row: KernelRow, peers: Sequence[str]) -> dict[str, str]:
    return {
        "format": row.format,
        "n x k": f"{row.n}x{row.k}",
        "m": str(row.m),
        "threads": str(row.threads),
        "us": f"{row.median_ns / 1e3:.1f}",
        "spread": percent(tables.spread(row.samples_ns)),
        "GFLOP/s": f"{row.gflops:.0f}",
        "GB/s": f"{row.gbps:.1f}",
        "peak": tables.limit_cell(row.peak_fraction),
        "bandwidth": tables.limit_cell(row.bandwidth_fraction),
        **{peer: _over(row, peer) if peer in row.peers else "" for peer in peers},
        "schedule": f"{row.schedule_source}: {schedule_text(row.schedule)}",
    }
