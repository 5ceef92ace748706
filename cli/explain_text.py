"""The output of `--explain`: the schedule of every product and of attention, as a table or as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phasewise._words import counted

if TYPE_CHECKING:
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse


def uses_fields(uses: Iterable[ScheduleUse]) -> list[dict[str, Any]]:
    """One JSON object for each entry."""
    return [asdict(use) for use in uses]


def uses_text(uses: Sequence[ScheduleUse]) -> str:
    """A table a phase, a row for each entry; `--json` has every parameter of a schedule."""
    from tabulate import tabulate

    tables = []
    for phase in dict.fromkeys(use.phase for use in uses):
        rows = [
            (
                use.used_for,
                _problem(use),
                _rows(use),
                _arithmetic(use),
                _tile_and_grid(use.schedule),
                _source(use),
                use.storage,
            )
            for use in uses
            if use.phase == phase
        ]
        headers = (phase, "format n x k", "rows", "computed by", "tile, grid", "schedule", "storage")
        tables.append(tabulate(rows, headers=headers, tablefmt="plain"))
    tables += dict.fromkeys(
        f"{_problem(use)}: {use.storage}\n  {use.storage_why}" for use in uses if use.storage_why
    )
    return "\n".join(tables)


def _source(use: ScheduleUse) -> str:
    """The first word of the reason: default, exact, neighbour."""
    return use.why.partition(":")[0].partition(" ")[0]


def _tile_and_grid(schedule: Mapping[str, Any] | None) -> str:
    if schedule is None:
        return "by the step"
    s = schedule
    return f"{s['mr']}x{16 * s['panels']}, {s['threads_m']}x{s['threads_n']}x{s['threads_k']}"


def _problem(use: ScheduleUse) -> str:
    return f"{use.format} {use.n} x {use.k}"


def _arithmetic(use: ScheduleUse) -> str:
    return use.compute_path + (f" in {counted(use.k_parts, 'part')}" if use.k_parts > 1 else "")


def _rows(use: ScheduleUse) -> str:
    return str(use.first_m) if use.first_m == use.last_m else f"{use.first_m}-{use.last_m}"
