"""The rows of `phasewise bench allreduce` and their forms."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from tabulate import tabulate

from phasewise.cli.all_reduce_rank import COPY
from phasewise.cli.present import SCHEMA_VERSION


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
    return json.dumps([{"schema_version": SCHEMA_VERSION, **asdict(row)} for row in rows], indent=2) + "\n"


def as_csv(rows: Sequence[AllReduceRow]) -> str:
    """Scalars only, a line for each system."""
    scalars = [f.name for f in fields(AllReduceRow) if f.type in {"str", "int", "float"}]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(scalars)
    writer.writerows([getattr(row, name) for name in scalars] for row in rows)
    return out.getvalue()


def as_md(rows: Sequence[AllReduceRow]) -> str:
    """A line for each size: the first system, and every other one's time over its."""
    points = dict.fromkeys((row.ranks, row.message_bytes) for row in rows)
    table = [_md_row([row for row in rows if (row.ranks, row.message_bytes) == point]) for point in points]
    text = tabulate(
        [list(row.values()) for row in table],
        headers=list(table[0]) if table else [],
        tablefmt="github",
        colalign=["right"] * len(table[0]) if table else None,
        disable_numparse=True,
    )
    return text + "\n"


FORMATS: dict[str, Callable[[Sequence[AllReduceRow]], str]] = {"md": as_md, "csv": as_csv, "json": as_json}


def _md_row(systems: Sequence[AllReduceRow]) -> Mapping[str, str]:
    first = systems[0]
    return {
        "ranks": str(first.ranks),
        "bytes": size_text(first.message_bytes),
        f"{first.system}, us": f"{first.median_ns / 1e3:.2f}",
        "spread": f"{_spread(first.samples_ns):.0%}",
        "GB/s": f"{first.gbps:.2f}",
        "of copying": f"{first.copy_fraction:.0%}",
        **{
            row.system: f"{row.median_ns / first.median_ns:.2f}x" for row in systems[1:] if row.system != COPY
        },
    }


def _spread(samples_ns: Sequence[int]) -> float:
    """Half the distance between the quartiles, over the median."""
    if len(samples_ns) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples_ns, n=4)
    return (high - low) / 2 / middle


def size_text(size: int) -> str:
    """`64 KiB` where it is a whole number of them."""
    for bits, unit in ((20, "MiB"), (10, "KiB")):
        if size % (1 << bits) == 0:
            return f"{size >> bits} {unit}"
    return f"{size} B"
