"""The rows of `phasewise bench kv` and their forms."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields

from tabulate import tabulate

from phasewise.cli.bench_kv import KvRow
from phasewise.cli.present import SCHEMA_VERSION


def as_json(rows: Sequence[KvRow]) -> str:
    """A list of objects, each with the version of our schema."""
    return json.dumps([{"schema_version": SCHEMA_VERSION, **asdict(row)} for row in rows], indent=2) + "\n"


def as_csv(rows: Sequence[KvRow]) -> str:
    """A line for each policy."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in fields(KvRow)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue()


def as_md(rows: Sequence[KvRow]) -> str:
    """A line for each policy."""
    table = [_md_row(row) for row in rows]
    return (
        tabulate(
            [list(row.values()) for row in table],
            headers=list(table[0]) if table else [],
            tablefmt="github",
            colalign=["left", "left", *["right"] * (len(table[0]) - 2)] if table else None,
            disable_numparse=True,
        )
        + "\n"
    )


FORMATS: dict[str, Callable[[Sequence[KvRow]], str]] = {"md": as_md, "csv": as_csv, "json": as_json}


def _md_row(row: KvRow) -> Mapping[str, str]:
    return {
        "policy": row.policy,
        "estimate": row.estimate.rsplit("/", 1)[-1],
        "live/reserved": f"{row.live_reserved:.1%}",
        "live/pool": f"{row.live_pool:.1%}",
        "final/reserved": f"{row.final_reserved:.1%}",
        "at once": f"{row.mean_running:.1f}",
        "failed": f"{row.failed}",
        "migrations": f"{row.migrations}",
        "preemptions": f"{row.preemptions}",
        "computed again": f"{row.recomputed_tokens}",
        "overflows": f"{row.overflows}",
        "mispredicted": f"{row.mispredicted / row.estimated:.1%}" if row.estimated else "-",
        "decode steps": f"{row.decode_steps}",
        "tokens/step": f"{row.tokens_a_step:.1f}",
    }
