"""The rows of `phasewise bench allreduce` and their forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phasewise.cli import row_forms
from phasewise.cli.all_reduce_rank import COPY


@dataclass(frozen=True)
class AllReduceRow:
    """One system adding up messages of one size, or copying them, over one rank a core."""

    ranks: int
    message_bytes: int
    system: str
    median_ns: int
    """Of the rounds; a round is the median of its turns, and a turn lasts as long as its slowest rank."""
    lowest_ns: int
    highest_ns: int
    gbps: float
    """Bytes of one message over the time."""
    copy_fraction: float
    """Median over the rounds of our pace over that of plain copying in the same round."""
    cores: Sequence[int]
    core_signature: str
    placement_signature: str
    steal: float
    """Share of the cores' time that other guests had meanwhile."""
    samples_ns: Sequence[int]
    """Of each round."""


def as_json(rows: Sequence[AllReduceRow]) -> str:
    """A list of objects, each with the version of our schema."""
    return row_forms.as_json(rows)


def as_csv(rows: Sequence[AllReduceRow]) -> str:
    """Scalars only, a line for each system."""
    scalars = row_forms.scalar_names(AllReduceRow)
    return row_forms.as_csv(scalars, ([getattr(row, name) for name in scalars] for row in rows))


def as_md(rows: Sequence[AllReduceRow]) -> str:
    """A line for each size: the first system, and every other one's time over its."""
    points = dict.fromkeys((row.ranks, row.message_bytes) for row in rows)
    return row_forms.as_md(
        [_md_row([row for row in rows if (row.ranks, row.message_bytes) == point]) for point in points]
    )


FORMATS: dict[str, Callable[[Sequence[AllReduceRow]], str]] = {"md": as_md, "csv": as_csv, "json": as_json}


def _md_row(systems: Sequence[AllReduceRow]) -> Mapping[str, str]:
    first = systems[0]
    return {
        "ranks": str(first.ranks),
        "bytes": size_text(first.message_bytes),
        f"{first.system}, us": f"{first.median_ns / 1e3:.2f}",
        "spread": f"{row_forms.spread(first.samples_ns):.0%}",
        "GB/s": f"{first.gbps:.2f}",
        "of copying": f"{first.copy_fraction:.0%}",
        **{
            row.system: f"{row.median_ns / first.median_ns:.2f}x" for row in systems[1:] if row.system != COPY
        },
    }


def size_text(size: int) -> str:
    """`64 KiB` where it is a whole number of them."""
    for bits, unit in ((20, "MiB"), (10, "KiB")):
        if size % (1 << bits) == 0:
            return f"{size >> bits} {unit}"
    return f"{size} B"
