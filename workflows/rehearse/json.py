"""A rehearsal as JSON values: what `tune-config --rehearse --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasewise.workflows.rehearse.check import Check
    from phasewise.workflows.rehearse.run import Rehearsal


def rehearsal_fields(rehearsal: Rehearsal) -> dict[str, Any]:
    """A rehearsal as JSON. Gains are over today's settings, in the objective's metric; above 1 is better."""
    check = rehearsal.check
    return {
        "objective": rehearsal.objective.kind,
        "steps": rehearsal.source,
        "requests": len(rehearsal.hour.arrivals),
        "span_s": rehearsal.hour.span_s,
        "today": asdict(rehearsal.today),
        "proposed": asdict(rehearsal.proposed),
        "options": rehearsal.proposed.options(rehearsal.today),
        "expected_gain": asdict(rehearsal.expected) if rehearsal.proposed != rehearsal.today else None,
        "check": None if check is None else _check_fields(check),
        "tried": [
            {**asdict(way), "gain": merit / rehearsal.today_merit} for way, merit in rehearsal.tried.items()
        ],
        "remarks": list(rehearsal.remarks),
    }


def _check_fields(check: Check) -> dict[str, Any]:
    return {
        "n_requests": check.n_requests,
        "window_s": check.window_s,
        "predicted": check.predicted,
        "measured": check.measured,
        "error": check.error,
    }
