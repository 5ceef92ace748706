"""A rehearsal as JSON values: what `tune-config --rehearse --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasewise.workflows.rehearse.run import Rehearsal


def rehearsal_fields(found: Rehearsal) -> dict[str, Any]:
    """All of it. Gains are over today's settings, of the objective's metric; above 1 is better."""
    check = found.check
    return {
        "objective": found.objective.kind,
        "steps": found.source,
        "requests": len(found.hour.arrivals),
        "span_s": found.hour.span_s,
        "today": asdict(found.today),
        "proposed": asdict(found.proposed),
        "options": found.proposed.options(found.today),
        "expected_gain": asdict(found.expected) if found.proposed != found.today else None,
        "check": None if check is None else {**asdict(check), "error": check.error},
        "tried": [{**asdict(way), "gain": merit / found.today_merit} for way, merit in found.tried.items()],
        "remarks": list(found.remarks),
    }
