"""The rows of a kernel comparison, the file that keeps them, and their summary by format."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

from phasewise._files import cut_broken_line, open_file, open_output
from phasewise._json import read_json
from phasewise._rows import Row, column, spread
from phasewise._version import SCHEMA_VERSION
from phasewise._words import limit_cell, percent, proven
from phasewise.tuner import timing
from phasewise.tuner.standing import MeasuredRatio, mean_of, ratio_of
from phasewise.workflows.errors import WorkflowError

LARGE_M = 128
"""Products with at least this many rows are compared with the peak."""

LARGE_WEIGHT_BYTES = 4_000_000
"""Weights of at least this size are summarised apart, for products of one row."""

PointKey: TypeAlias = tuple[str, int, int, int, int]
"""Format, n, k, m and threads: the product that a row describes."""


class KernelRow(Row):
    """One product on `threads` threads: y[m, n] = x[m, k] W[n, k]^T, weights from memory, x float32."""

    format: str = column("format", left=True, narrow=True)
    n: int = column("n x k", of_row=lambda row: f"{row.n}x{row.k}", narrow=True)
    k: int
    m: int = column("m", narrow=True)
    threads: int = column("threads")
    median_ns: int = column("us", ".1f", per=1e3, narrow=True)
    gflops: float = column("GFLOP/s", ".0f", narrow=True)
    gbps: float = column("GB/s", ".1f")
    """Bytes of packed weights, scales included, per nanosecond; activations are not counted."""
    peak_fraction: float = column("peak", limit_cell, narrow=True)
    bandwidth_fraction: float = column("bandwidth", limit_cell, narrow=True)
    """Median over the rounds of our read rate over that of plain reading in the same round."""
    schedule: Mapping[str, int | str]
    peers: Mapping[str, int] = column("", of_row=lambda row: row.peer_cells, narrow=True)
    """Median nanoseconds of each peer that does this product."""
    schedule_source: str = column(
        "schedule", of_row=lambda row: f"{row.schedule_source}: {schedule_text(row.schedule)}", left=True
    )
    """exact, neighbour or default."""
    weight_bytes: int
    peak_flops_per_s: float
    read_bytes_per_s: float
    isa: str
    core_signature: str
    placement_signature: str
    steal: float
    """Share of the cores' time that other guests had while this was timed."""
    samples_ns: Sequence[int] = column("spread", lambda samples: percent(spread(samples)))
    peer_samples_ns: Mapping[str, Sequence[int]]
    peer_settings: Mapping[str, str]

    @property
    def key(self) -> PointKey:
        return self.format, self.n, self.k, self.m, self.threads

    def over(self, peer: str) -> MeasuredRatio:
        """Speed over that of a peer at this point, by rounds in turns."""
        return ratio_of(timing.compare_rounds(self.peer_samples_ns[peer], self.samples_ns))

    @property
    def peer_cells(self) -> dict[str, str]:
        """Our speed over that of each peer, where it is proven."""
        return {peer: _cell(self.over(peer)) for peer in self.peers}

    @property
    def speedup(self) -> MeasuredRatio | None:
        """Speed over that of the best peer; None without peers."""
        return self.over(min(self.peers, key=self.peers.__getitem__)) if self.peers else None


class FormatSummary(Row):
    """The summary of the rows of one format; None where no row applies."""

    format: str = column("format", left=True)
    points: int = column("points")
    """Points that a peer computed too."""
    speedup: MeasuredRatio | None = column("over the best peer", of_row=lambda row: _cell(row.speedup))
    """Geometric mean over the points of the speed over the best peer's."""
    worst_speedup: MeasuredRatio | None = column("worst", of_row=lambda row: _cell(row.worst_speedup))
    worst_point: str = column("worst point", left=True)
    peak: tuple[float, float] | None = column(
        f"peak, m >= {LARGE_M}: lowest, median", of_row=lambda row: _shares(row.peak)
    )
    """Lowest and median share of the peak."""
    bandwidth_large: tuple[float, float] | None = column(
        "bandwidth, m = 1, 4 MB and more", of_row=lambda row: _shares(row.bandwidth_large)
    )
    """Lowest and median share of the bandwidth."""
    bandwidth_small: tuple[float, float] | None = column(
        "below 4 MB", of_row=lambda row: _shares(row.bandwidth_small)
    )


def _cell(ratio: MeasuredRatio | None) -> str:
    return "" if ratio is None else proven(ratio.gain, ratio.low, ratio.high)


def _shares(low_and_middle: tuple[float, float] | None) -> str:
    return "" if low_and_middle is None else ", ".join(map(percent, low_and_middle))


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


def summarise(rows: Sequence[KernelRow]) -> list[FormatSummary]:
    """One summary a format, in the order in which the formats appear."""
    return [
        _summary(name, [row for row in rows if row.format == name])
        for name in dict.fromkeys(row.format for row in rows)
    ]


def _summary(name: str, rows: Sequence[KernelRow]) -> FormatSummary:
    speedups = {_point(row): row.speedup for row in rows if row.speedup is not None}
    worst = min(speedups, key=lambda point: speedups[point].gain, default="")
    single = [row for row in rows if row.m == 1]
    return FormatSummary(
        format=name,
        points=len(speedups),
        speedup=mean_of(speedups.values()) if speedups else None,
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


def rows_from_json(text: str) -> list[KernelRow]:
    """The rows in a JSON array, or in one JSON object per line."""
    rows = read_json(text) if text.lstrip().startswith("[") else map(read_json, text.splitlines())
    names = [field.name for field in fields(KernelRow)]
    return [KernelRow(**{name: row[name] for name in names}) for row in rows]


def as_line(row: KernelRow) -> str:
    """A row as one line of a `RowFile`."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(row)}) + "\n"


class RowFile:
    """A file of rows, one JSON object per line, written as each row is measured.

    A run that is killed loses at most the row in flight: a last line without a newline is removed. Raises
    ValueError for a file of anything else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        cut_broken_line(path)
        text = ""
        if path.is_file():
            with open_file(path) as file:
                text = file.read().decode()
        try:
            self.rows = rows_from_json(text)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no rows of `bench kernels --rows`: {error!r}") from error

    def add(self, row: KernelRow) -> None:
        try:
            with os.fdopen(open_output(self._path, os.O_CREAT | os.O_APPEND), "a", encoding="utf-8") as file:
                file.write(as_line(row))
        except OSError as error:
            raise WorkflowError(f"{self._path} cannot be written: {error.strerror}") from None
        self.rows.append(row)
