"""The rows of `phasewise bench kv` as JSON, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from phasewise._words import percent
from phasewise.cli import row_forms
from phasewise.workflows.bench.kv.replay import KvRow


def as_json(rows: Sequence[KvRow]) -> str:
    """A list of objects, each with the version of our schema."""
    return row_forms.as_json(rows)


def as_csv(rows: Sequence[KvRow]) -> str:
    """A line for each policy."""
    names = [field.name for field in fields(KvRow)]
    return row_forms.as_csv(names, ([getattr(row, name) for name in names] for row in rows))


CORE = ("policy", "estimate", "at once", "failed", "preemptions", "tokens/s", "live/reserved")


def as_md(rows: Sequence[KvRow], *, wide: bool = False) -> str:
    """A line for each policy."""
    lines = [_md_row(row) for row in rows]
    return row_forms.as_md(lines, left=("policy", "estimate"), core=() if wide else CORE)


FORMATS: dict[str, Callable[..., str]] = {"md": as_md, "csv": as_csv, "json": as_json}


def _md_row(row: KvRow) -> Mapping[str, str]:
    return {
        "policy": row.policy,
        "estimate": row.estimate.rsplit("/", 1)[-1][-12:],
        "live/reserved": percent(row.live_reserved, 1),
        "live/pool": percent(row.live_pool, 1),
        "final/reserved": percent(row.final_reserved, 1),
        "at once": f"{row.mean_running:.1f}",
        "failed": f"{row.failed}",
        "migrations": f"{row.migrations}",
        "slots moved": f"{row.moved_slots}",
        "preemptions": f"{row.preemptions}",
        "computed again": f"{row.recomputed_tokens}",
        "overflows": f"{row.overflows}",
        "mispredicted": percent(row.mispredicted / row.estimated, 1) if row.estimated else "-",
        "decode steps": f"{row.decode_steps}",
        "tokens/step": f"{row.tokens_a_step:.1f}",
        "steps to first": f"{row.steps_to_first:.1f}",
        "tokens/s": "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
    }
