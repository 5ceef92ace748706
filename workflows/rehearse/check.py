"""The measured run of a rehearsal: the same requests by today's settings and by the proposed ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from phasewise._words import counted
from phasewise.workflows.rehearse.hour import Hour, busiest_part
from phasewise.workflows.rehearse.replayed import replayed
from phasewise.workflows.rehearse.ways import ServerWay, Stage, merit

if TYPE_CHECKING:
    from phasewise.cluster.simulated.simulated_requests import Arrival
    from phasewise.workflows.rehearse.engines import Engines
    from phasewise.workflows.report import Report

LEAST_WINDOW_S, MOST_WINDOW_S = 2.0, 300.0
"""Bounds of the run of each setting."""

WINDOW_SHARE = 0.8
"""Share of the time that is left then, for all settings: what is simulated to end in it may take longer."""


LEAST_OF_PREDICTED = 0.9
"""The share of a simulated gain that a run has to show."""


class Merits(NamedTuple):
    """Merits of some settings, as `ways.merit` has them: simulated, and of the run."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class Check:
    """One measured run: the same requests by today's settings and by the proposed ones."""

    n_requests: int
    window_s: float
    today: Merits
    proposed: Merits

    @property
    def predicted(self) -> float:
        """The gain that was simulated."""
        return self.proposed.predicted / self.today.predicted

    @property
    def measured(self) -> float:
        """The gain of the run."""
        return self.proposed.measured / self.today.measured

    @property
    def reaches_predicted(self) -> bool:
        """The run gains what was simulated, or at most a tenth less."""
        return self.measured >= LEAST_OF_PREDICTED * self.predicted

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measured gain."""
        return self.predicted / self.measured - 1


def checked(
    ways: tuple[ServerWay, ServerWay],
    hour: Hour,
    stage: Stage,
    engines: Engines,
    deadline_s: float,
    report: Report,
) -> Check | None:
    """None where there is no time for it. Where both settings draft, the answers are made once before."""
    plain = next((way for way in ways if way.draft_tokens is None), replace(ways[0], draft_tokens=None))
    runs = list(dict.fromkeys((plain, *ways)))
    window_s = min(MOST_WINDOW_S, WINDOW_SHARE * (deadline_s - time.monotonic()) / len(runs))
    if window_s < LEAST_WINDOW_S:
        report("no time is left to check the proposal: give a larger --budget")
        return None

    def ends_s(part: Sequence[Arrival]) -> float:
        return max(life.end_s for way in runs for life in stage.lives(way, part))

    part = busiest_part(hour, window_s, ends_s)
    report(
        f"checking by {counted(len(runs), 'run')} of {counted(len(part), 'request')}, "
        f"{window_s:.0f} s each at most ..."
    )
    answers: Sequence[Sequence[int]] = ()
    merits = {}
    for way in runs:
        with engines.host(way, part, answers) as host:
            replay = replayed(host, engines.n_vocabulary, part)
        merits[way] = Merits(stage.merit(way, part), merit(stage.objective, replay.lives))
        answers = answers or replay.answers
    today, proposed = ways
    return Check(len(part), window_s, merits[today], merits[proposed])
