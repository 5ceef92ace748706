"""A rehearsal in words."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from phasewise._words import counted, multiple, number, percent

if TYPE_CHECKING:
    from phasewise.workflows.rehearse.run import Rehearsal

WIDTH = 80
METRICS = {
    "ttft": "mean time to the first token",
    "tpot": "mean time per later token",
    "e2e": "mean time to the last token",
    "goodput": "requests that keep the SLO",
}


def rehearsal_text(rehearsal: Rehearsal) -> str:
    """The hour, the proposal, its gain and its error, and all that was left out."""
    lines = [
        f"{counted(len(rehearsal.hour.arrivals), 'request')} in "
        f"{number(rehearsal.hour.span_s / 60, 3)} minutes; "
        f"{METRICS[rehearsal.objective.kind]} today, simulated: {_today(rehearsal)}"
    ]
    if rehearsal.proposed == rehearsal.today:
        lines.append(f"Today's settings stay: none of {len(rehearsal.tried) - 1} others is shown to gain.")
    else:
        expected = rehearsal.expected
        lines.append(f"Proposed: phasewise serve {' '.join(rehearsal.proposed.options(rehearsal.today))}")
        lines.append(
            f"Expected gain: {multiple(expected.gain, 3)} ({expected.low:.3f} to {expected.high:.3f}, "
            "over other samples of the same steps)"
        )
        lines.append(_check_line(rehearsal))
    lines += [f"{remark[0].upper()}{remark[1:]}." for remark in rehearsal.remarks]
    return "\n".join(textwrap.fill(line, WIDTH, break_on_hyphens=False) for line in lines)


def _today(rehearsal: Rehearsal) -> str:
    if rehearsal.objective.kind == "goodput":
        return percent(rehearsal.today_merit, 1)
    return f"{number(1 / rehearsal.today_merit, 3)} s"


def _check_line(rehearsal: Rehearsal) -> str:
    check = rehearsal.check
    if check is None:
        return "The gain was not checked by a run."
    return (
        f"Checked by {counted(check.n_requests, 'request')} of the busiest part, run by both settings: "
        f"predicted {multiple(check.predicted, 3)}, measured {multiple(check.measured, 3)}, "
        f"error {100 * check.error:+.1f}%"
    )
