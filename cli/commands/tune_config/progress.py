"""Progress of `tune-config` on stderr while it searches: the trees as they are walked, and how long it takes.

Each improvement gets a line. With `--verbose` a tree gets one when it is met and when it is cut, too; after
some dozens only improvements do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.cli.commands.tune_config.text import milliseconds
from phasewise.cli.commands.tune_kernels.text import where_of
from phasewise.cli.status_line import StatusLine, status_line
from phasewise.tuner.config.study import Event, Tried
from phasewise.tuner.config.walk import PrunedTree, Stopped
from phasewise.tuner.plans import Phase, list_cores
from phasewise.workflows.tune_config.json import plan_words

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.tuning_run import TuningProgress

MOST_TREE_LINES = 30
"""Lines per phase; a large machine has thousands of trees."""

WIDTH = 79
STEP = " | "


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

    def __init__(self, status: StatusLine, machine: Machine, clock: CommandClock, *, verbose: bool) -> None:
        self._status = status
        self._machine = machine
        self._clock = clock
        self._verbose = verbose
        self.say = status.say

    def searching(self, phase: Phase) -> Callable[[Event], None]:
        """The receiver of a phase's search."""
        search = _Search(phase, self._machine, verbose=self._verbose)

        def report(event: Event) -> None:
            line = search.line(event)
            if line is not None:
                self.say(line[:WIDTH])
            if isinstance(event, Tried):
                self.stage(search.where(event))

        return report

    def tuning(self, progress: TuningProgress) -> None:
        """The progress of the tuning of kernels."""
        self.stage(f"kernels {where_of(progress)}")

    def stage(self, name: str) -> None:
        """The current stage."""
        self._status.show(lambda: f"{self._clock}: {name}")


@contextmanager
def progress_of_search(machine: Machine, clock: CommandClock, *, verbose: bool) -> Iterator[SearchProgress]:
    """Lines on stderr. `verbose`: with the trees that are searched."""
    with status_line() as status:
        yield SearchProgress(status, machine, clock, verbose=verbose)


class _Search:
    """One phase: which trees were met, and the best so far."""

    def __init__(self, phase: Phase, machine: Machine, *, verbose: bool) -> None:
        self._phase = phase
        self._machine = machine
        self._verbose = verbose
        self._trees: set[str] = set()
        self._best_ms: float | None = None
        self._lines = 0
        self._decision: str | None = None

    def line(self, event: Event) -> str | None:
        """The line of an event, None for nothing."""
        if isinstance(event, Tried):
            return self._tried_line(event)
        return self._decision_line(event) if self._verbose else None

    def _decision_line(self, event: PrunedTree | Stopped) -> str | None:
        """None also for what the last one said: trees of other groupings often fall for the same reason."""
        words = _cut_words(event) if isinstance(event, PrunedTree) else _stopped_words(event)
        if self._lines >= MOST_TREE_LINES or words == self._decision:
            return None
        self._lines += 1
        self._decision = words
        return f"{self._phase:8}{words}"

    def where(self, event: Tried) -> str:
        """E.g. `search of prefill, 12 of at most 40, best 38.1 ms`."""
        best = "" if event.best is None else f", best {milliseconds(event.best[1])}"
        return f"search of {self._phase}, {event.number} of at most {event.configurations}{best}"

    def _tried_line(self, tried: Tried) -> str | None:
        best_ms = None if tried.best is None else tried.best[1]
        is_better = best_ms is not None and (self._best_ms is None or best_ms < self._best_ms)
        tree = tried.candidate.notation
        is_new = tree not in self._trees
        self._best_ms = best_ms
        self._trees.add(tree)
        if not is_better and (not self._verbose or not is_new or self._lines >= MOST_TREE_LINES):
            return None
        self._lines += 1
        drawn = f"{_drawn(tree)}  " if self._verbose else ""
        return f"{self._phase:8}{drawn}{_result(tried, self._machine)}{', best so far' if is_better else ''}"


def _cut_words(cut: PrunedTree) -> str:
    slower = "cannot run" if cut.cost_ms == math.inf else "costs more than its parent"
    return f"{_drawn(cut.tree.notation)}  cut with all below it ({_ranks(cut.ranks)}): {slower}"


def _stopped_words(stopped: Stopped) -> str:
    nodes = sorted({node for node in stopped.numa_nodes if node is not None})
    where = f" on NUMA nodes {list_cores(nodes)}" if nodes else ""
    best = "" if stopped.best_ms == math.inf else f": no better than {milliseconds(stopped.best_ms)}"
    return f"given up: {_ranks(stopped.ranks)}{where}{best}"


def _ranks(count: int) -> str:
    return counted(count, "rank")


def _drawn(notation: str) -> str:
    """The last transformation, as deep as there are transformations before it."""
    steps = notation.split(STEP)
    return "  " * (len(steps) - 1) + steps[-1]


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
