"""The rows of `phasewise bench kernels`, their forms, and the few numbers that they come down to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from phasewise.cli import row_forms
from phasewise.cli.chart import Chart, Panel, draw_chart

LARGE_M = 128
"""From here on a product is held against the peak."""

LARGE_WEIGHT_BYTES = 4_000_000
"""From here on a product of one row is held against the whole bandwidth."""


PointKey: TypeAlias = tuple[str, int, int, int, int]
"""Format, n, k, m and threads: what a row is of."""


@dataclass(frozen=True)
class KernelRow:
    """One product on so many threads: y[m, n] = x[m, k] W[n, k]^T, weights from memory, x from float32."""

    format: str
    n: int
    k: int
    m: int
    threads: int
    median_ns: int
    gflops: float
    gbps: float
    """Weight bytes as packed, scales included, a second; activations are not counted."""
    peak_fraction: float
    bandwidth_fraction: float
    """Median over the rounds of our pace over that of plain reading in the same round."""
    schedule: Mapping[str, int | str]
    peers: Mapping[str, int]
    """Median nanoseconds of each peer that does this product."""
    schedule_source: str
    """exact, neighbour or default."""
    weight_bytes: int
    peak_flops_per_s: float
    read_bytes_per_s: float
    isa: str
    core_signature: str
    placement_signature: str
    steal: float
    """Share of the cores' time that other guests had while this was timed."""
    samples_ns: Sequence[int]
    peer_samples_ns: Mapping[str, Sequence[int]]
    peer_settings: Mapping[str, str]

    @property
    def key(self) -> PointKey:
        return self.format, self.n, self.k, self.m, self.threads

    @property
    def best_peer_ns(self) -> int | None:
        return min(self.peers.values(), default=None)

    @property
    def speedup(self) -> float | None:
        """Speed over that of the best peer at this point; None without peers."""
        best_ns = self.best_peer_ns
        return None if best_ns is None else best_ns / self.median_ns


@dataclass(frozen=True)
class Summary:
    """What the rows of one format come down to; None where no row speaks of it."""

    format: str
    points: int
    """Those that a peer computed too."""
    speedup: float | None
    """Geometric mean over the points of the speed over the best peer's."""
    worst_speedup: float | None
    worst_point: str
    peak: tuple[float, float] | None
    """Lowest and median share of the peak, m of 128 and more."""
    bandwidth_large: tuple[float, float] | None
    """Lowest and median share of the bandwidth, m = 1, weights of 4 MB and more."""
    bandwidth_small: tuple[float, float] | None
    """The same below 4 MB."""


def summarise(rows: Sequence[KernelRow]) -> list[Summary]:
    """One summary a format, in the order in which the formats appear."""
    return [
        _summary(name, [row for row in rows if row.format == name])
        for name in dict.fromkeys(row.format for row in rows)
    ]


def _summary(name: str, rows: Sequence[KernelRow]) -> Summary:
    speedups = {_point(row): row.speedup for row in rows if row.speedup is not None}
    worst = min(speedups, key=lambda point: speedups[point], default="")
    single = [row for row in rows if row.m == 1]
    return Summary(
        format=name,
        points=len(speedups),
        speedup=math.exp(statistics.fmean(map(math.log, speedups.values()))) if speedups else None,
        worst_speedup=speedups.get(worst),
        worst_point=worst,
        peak=_low_and_middle([row.peak_fraction for row in rows if row.m >= LARGE_M]),
        bandwidth_large=_low_and_middle(
            [row.bandwidth_fraction for row in single if row.weight_bytes >= LARGE_WEIGHT_BYTES]
        ),
        bandwidth_small=_low_and_middle(
            [row.bandwidth_fraction for row in single if row.weight_bytes < LARGE_WEIGHT_BYTES]
        ),
    )


def _point(row: KernelRow) -> str:
    return f"{row.n}x{row.k}, m = {row.m}"


def _low_and_middle(shares: Sequence[float]) -> tuple[float, float] | None:
    return (min(shares), statistics.median(shares)) if shares else None


def as_json(rows: Sequence[KernelRow]) -> str:
    """A list of objects, each with the version of our schema."""
    return row_forms.as_json(rows)


def rows_from_json(text: str) -> list[KernelRow]:
    """The rows that `as_json` or `as_line` wrote."""
    found = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    names = [field.name for field in fields(KernelRow)]
    return [KernelRow(**{name: row[name] for name in names}) for row in found]


def as_line(row: KernelRow) -> str:
    """As `RowFile` keeps it."""
    return json.dumps(row_forms.json_fields(row)) + "\n"


class RowFile:
    """Rows that are kept one by one as they are measured; a run that was killed loses the one in flight.

    A last line without its end is that one: it is cut off. ValueError for a file of something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        try:
            self.rows = rows_from_json(whole)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no rows of `bench kernels --rows`: {error!r}") from error
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def add(self, row: KernelRow) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(as_line(row))
        self.rows.append(row)


def as_csv(rows: Sequence[KernelRow]) -> str:
    """Scalars, the schedule in one cell, and a column of nanoseconds for every peer of the run."""
    peers = _peer_names(rows)
    scalars = row_forms.scalar_names(KernelRow)
    lines = (
        [
            *(getattr(row, name) for name in scalars),
            schedule_text(row.schedule),
            *(row.peers.get(peer, "") for peer in peers),
        ]
        for row in rows
    )
    return row_forms.as_csv([*scalars, "schedule", *(f"{peer}_ns" for peer in peers)], lines)


def as_md(rows: Sequence[KernelRow]) -> str:
    """A table of the points, peers as the ratio of our speed to theirs, and a table of the summaries."""
    points = [_md_row(row, _peer_names(rows)) for row in rows]
    return row_forms.as_md(points, left=("format", "schedule")) + "\n" + summary_table(rows)


def summary_table(rows: Sequence[KernelRow]) -> str:
    """What the rows come down to, by format, as Markdown."""
    return row_forms.as_md(
        [_md_summary(summary) for summary in summarise(rows)], left=("format", "worst point")
    )


FORMATS: dict[str, Callable[[Sequence[KernelRow]], str]] = {"md": as_md, "csv": as_csv, "json": as_json}


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
    return "1 thread" if count == 1 else f"{count} threads"


def _peer_names(rows: Sequence[KernelRow]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in row.peers))


def _md_row(row: KernelRow, peers: Sequence[str]) -> dict[str, str]:
    return {
        "format": row.format,
        "n x k": f"{row.n}x{row.k}",
        "m": str(row.m),
        "threads": str(row.threads),
        "us": f"{row.median_ns / 1e3:.1f}",
        "spread": f"{row_forms.spread(row.samples_ns):.0%}",
        "GFLOP/s": f"{row.gflops:.0f}",
        "GB/s": f"{row.gbps:.1f}",
        "peak": f"{row.peak_fraction:.0%}",
        "bandwidth": f"{row.bandwidth_fraction:.0%}",
        **{peer: f"{row.peers[peer] / row.median_ns:.2f}x" if peer in row.peers else "" for peer in peers},
        "schedule": f"{row.schedule_source}: {schedule_text(row.schedule)}",
    }


def _md_summary(summary: Summary) -> dict[str, str]:
    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}x"

    def shares(found: tuple[float, float] | None) -> str:
        return "" if found is None else f"{found[0]:.0%}, {found[1]:.0%}"

    return {
        "format": summary.format,
        "points": str(summary.points),
        "over the best peer": ratio(summary.speedup),
        "worst": ratio(summary.worst_speedup),
        "worst point": summary.worst_point,
        f"peak, m >= {LARGE_M}: lowest, median": shares(summary.peak),
        "bandwidth, m = 1, 4 MB and more": shares(summary.bandwidth_large),
        "below 4 MB": shares(summary.bandwidth_small),
    }
