"""Progress of `tune-config` on stderr: a line for each improvement, and how long the search takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise.cli.commands.tune_config.text import milliseconds
from phasewise.cli.commands.tune_kernels.text import where_of
from phasewise.cli.status_line import StatusLine, status_line
from phasewise.tuner.config.study import Event, Tried
from phasewise.tuner.plans import Phase
from phasewise.workflows.tune_config.json import plan_words

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.tuning_run import TuningProgress

WIDTH = 79


@dataclass(frozen=True)
class CommandClock:
    """The one clock of a command: how long it has run of what it may run."""

    started_s: float
    """By `time.monotonic`."""
    budget_s: float

    def __str__(self) -> str:
        return f"{_clock(time.monotonic() - self.started_s)} of {_clock(self.budget_s)}"


class SearchProgress:
    """The progress of a run of `tune-config` on `machine`: its stage, beside the command's clock."""

    def __init__(self, status: StatusLine, machine: Machine, clock: CommandClock) -> None:
        self._status = status
        self._machine = machine
        self._clock = clock
        self.say = status.say

    def searching(self, phase: Phase) -> Callable[[Event], None]:
        """The receiver of a phase's search."""
        search = _Search(phase, self._machine)

        def report(event: Event) -> None:
            if isinstance(event, Tried):
                if (line := search.line(event)) is not None:
                    self.say(line[:WIDTH])
                self.stage(search.where(event))

        return report

    def tuning(self, progress: TuningProgress) -> None:
        """The progress of the tuning of kernels."""
        self.stage(f"kernels {where_of(progress)}")

    def stage(self, name: str) -> None:
        """The current stage."""
        self._status.show(lambda: f"{self._clock}: {name}")


@contextmanager
def progress_of_search(machine: Machine, clock: CommandClock) -> Iterator[SearchProgress]:
    """Lines on stderr."""
    with status_line() as status:
        yield SearchProgress(status, machine, clock)


class _Search:
    """One phase: the best so far."""

    def __init__(self, phase: Phase, machine: Machine) -> None:
        self._phase = phase
        self._machine = machine
        self._best_ms: float | None = None

    def line(self, tried: Tried) -> str | None:
        """The line of an improvement, None for nothing."""
        best_ms = None if tried.best is None else tried.best[1]
        is_better = best_ms is not None and (self._best_ms is None or best_ms < self._best_ms)
        self._best_ms = best_ms
        return f"{self._phase:8}{_result(tried, self._machine)}, best so far" if is_better else None

    def where(self, event: Tried) -> str:
        """E.g. `search of prefill, 12 of at most 40, best 38.1 ms`."""
        best = "" if event.best is None else f", best {milliseconds(event.best[1])}"
        return f"search of {self._phase}, {event.number} of at most {event.configurations}{best}"


def _result(tried: Tried, machine: Machine) -> str:
    words = plan_words(tried.candidate.configuration.plan("decode"), machine)
    if tried.state == "failed":
        return f"{words} failed: {tried.reason}"
    replayed = ", known before" if tried.is_replayed else ""
    if tried.state == "pruned" or tried.cost_ms is None:
        return f"{words}: stopped early{replayed}"
    return f"{words}: {milliseconds(tried.cost_ms)}{replayed}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
