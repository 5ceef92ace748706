"""What `--explain` prints: the schedule of every product and of attention, as a table or as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phasewise.workflows.machine_facts import schedule_words

if TYPE_CHECKING:
    from phasewise.workflows.tuned_schedules import ScheduleUse


def uses_fields(uses: Iterable[ScheduleUse]) -> list[dict[str, Any]]:
    """One JSON object for each entry."""
    return [asdict(use) for use in uses]


def uses_text(uses: Sequence[ScheduleUse]) -> str:
    """One table, a row for each entry."""
    from tabulate import tabulate

    rows = [
        (
            use.phase,
            use.used_for,
            _problem(use),
            _arithmetic(use),
            _rows(use),
            use.why,
            schedule_words(use.schedule),
        )
        for use in uses
    ]
    return tabulate(
        rows,
        headers=("phase", "used for", "format n x k", "computed by", "rows", "why", "schedule"),
        tablefmt="plain",
    )


def _problem(use: ScheduleUse) -> str:
    return f"{use.format} {use.n} x {use.k}"


def _arithmetic(use: ScheduleUse) -> str:
    return use.compute_path + (f" in {use.k_parts} parts" if use.k_parts > 1 else "")


def _rows(use: ScheduleUse) -> str:
    return str(use.first_m) if use.first_m == use.last_m else f"{use.first_m}-{use.last_m}"
