"""Progress of a tuning run: the share of its work that is done, and the time that the rest may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phasewise.kerneldb.records import Problem
from phasewise.tuner.task_division import Task

CALLS_A_TIMING = 6
SHORTEST_TIMING_S = 0.008


class Pace:
    """The share of the work that is done, by the weight of its products; replayed ones count as no work."""

    def __init__(self, tasks: Sequence[Task], call_s: Callable[[Problem], float]) -> None:
        """call_s: about how many seconds one call of a product takes."""
        self._work = {
            problem: 1.0 + CALLS_A_TIMING * call_s(problem) / SHORTEST_TIMING_S
            for task in tasks
            for problem in task.problems
        }
        self._left = dict(self._work)
        self._done = 0.0
        self._timed: set[Problem] = set()
        self._last: Problem | None = None

    def work_of(self, task: Task) -> float:
        """About how long a task takes, in units of its shortest timings."""
        return sum(self._work[problem] for problem in task.problems)

    def reach(self, task: Task, m: int, timed: bool) -> None:
        """Note that a task's search asks for m.

        One m is done when the next is asked for; probes jump about.
        """
        problem, before = task.problem(m), task.ms[: task.ms.index(m)][-1:]
        if timed:
            self._timed.add(problem)
        if before and self._last == (last := task.problem(before[0])):
            self._drop(last)
        self._last = problem

    def finish(self, task: Task) -> None:
        for problem in task.problems:
            self._drop(problem)

    def left_s(self, timing_s: float) -> float | None:
        """Seconds that the rest may take, if the work so far took `timing_s`; None before the first product
        is done."""
        return timing_s * sum(self._left.values()) / self._done if self._done else None

    def _drop(self, problem: Problem) -> None:
        work = self._left.pop(problem, 0.0)
        if problem in self._timed:
            self._done += work
