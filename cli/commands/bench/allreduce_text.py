"""The rows of `phasewise bench allreduce` as JSON, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from phasewise._words import percent, proven
from phasewise.cli import row_forms
from phasewise.tuner.timing import compare_rounds
from phasewise.workflows.bench.allreduce.compare import AllReduceRow, size_text
from phasewise.workflows.bench.allreduce.rank import COPY


def as_json(rows: Sequence[AllReduceRow]) -> str:
    """A list of objects, each with the version of our schema."""
    return row_forms.as_json(rows)


def as_csv(rows: Sequence[AllReduceRow]) -> str:
    """Scalars only, a line for each system."""
    scalars = row_forms.scalar_names(AllReduceRow)
    return row_forms.as_csv(scalars, ([getattr(row, name) for name in scalars] for row in rows))


def as_md(rows: Sequence[AllReduceRow], *, wide: bool = False) -> str:
    """A line for each size: the first system, and every other one's time over its."""
    points = dict.fromkeys((row.ranks, row.message_bytes) for row in rows)
    lines = [_md_row([row for row in rows if (row.ranks, row.message_bytes) == point]) for point in points]
    core = [name for name in lines[0] if name not in LAST] + list(LAST) if lines and not wide else ()
    return row_forms.as_md(lines, core=core)


LAST = ("GB/s", "spread")
"""Columns that a narrow table does without."""
FORMATS: dict[str, Callable[..., str]] = {"md": as_md, "csv": as_csv, "json": as_json}


def _over(row: AllReduceRow, first: AllReduceRow) -> str:
    rounds = compare_rounds(row.samples_ns, first.samples_ns)
    return proven(rounds.gain, rounds.gain_low, rounds.gain_high)


def _md_row(systems: Sequence[AllReduceRow]) -> Mapping[str, str]:
    first = systems[0]
    return {
        "ranks": str(first.ranks),
        "bytes": size_text(first.message_bytes),
        f"{first.system}, us": f"{first.median_ns / 1e3:.2f}",
        "spread": percent(row_forms.spread(first.samples_ns)),
        "GB/s": f"{first.gbps:.2f}",
        "of copying": percent(first.copy_fraction),
        **{row.system: _over(row, first) for row in systems[1:] if row.system != COPY},
    }
