"""The tasks of a run: weights and the rows to tune them for, what each may learn from others, and their pace.

What a search may learn from other weights depends on the database alone: the schedules in use for weights
that were settled before this one was begun. So a run that asks again asks the same.

Products have two laws of rows, for the time t(m) of m rows, to within an allowance: more rows never cost
less, and no product is slower than two smaller ones, t(a + b) <= t(a) + t(b). `breaking` names the rows that
break one.

`Pace` tells which share of a run's work is done, and the time that the rest may take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from phasewise.kerneldb.records import Problem
from phasewise.tuner.ledger import Ledger
from phasewise.tuner.search.group import Group, GroupOutcome, ScheduleCache, tune_group
from phasewise.tuner.search.protocol import GroupSearch, SearchOptions
from phasewise.tuner.search.space import Arithmetic, arithmetic_of

Times: TypeAlias = Mapping[int, float]
"""Time of a product by its number of rows."""

MOST_ROWS = 64
"""Most rows for which the laws are asked: one row more is one more sequence, or one more token of a draft."""

ALLOWANCE = 0.05
"""Excess over a ratio of 1 that is allowed: two timings of one product differ by as much on a quiet
machine."""


class Breach(NamedTuple):
    """The largest ratio of a law's two sides, and the numbers of rows on them."""

    ratio: float
    dearer: int
    others: tuple[int, ...]


def breaking(times: Times, allowance: float = ALLOWANCE) -> tuple[int, ...]:
    """The numbers of rows whose products are too slow by a law, ascending."""
    both = (*beside_more(times), *beside_two(times))
    return tuple(sorted({breach.dearer for breach in both if breach.ratio > 1 + allowance}))


def beside_more(times: Times) -> Iterator[Breach]:
    """Each product beside those with more rows."""
    return (Breach(times[m] / times[more], m, (more,)) for m in times for more in times if more > m)


def beside_two(times: Times) -> Iterator[Breach]:
    """Each product beside any two that share out its rows."""
    cuts = ((a, m - a) for m in times for a in times if a <= m - a and m - a in times)
    return (Breach(times[a + b] / (times[a] + times[b]), a + b, (a, b)) for a, b in cuts)


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
        self._times: dict[Problem | None, tuple[float, float]] = {}
        """Timings and their seconds by problem; under None the work of all and theirs."""

    def work_of(self, task: Task) -> float:
        """About how long a task takes, in units of its shortest timings."""
        return sum(self._work[problem] for problem in task.problems)

    def reach(self, task: Task, m: int, timed: bool) -> None:
        """Note that a task's search asks for m. One m is done when the next is asked for; probes jump
        about."""
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

    def time(self, problem: Problem, n_timings: int, seconds: float) -> None:
        """Count timings that have ended."""
        for key in (problem, None):
            n, so_far_s = self._times.get(key, (0.0, 0.0))
            work = n_timings if key else n_timings * self._work[problem]
            self._times[key] = n + work, so_far_s + seconds

    def timing_s(self, problem: Problem) -> float | None:
        """The expected time of one timing: the mean of this problem's, else by its work. None before any."""
        for key, work in ((problem, 1.0), (None, self._work[problem])):
            if key in self._times:
                n, seconds = self._times[key]
                return work * seconds / n
        return None

    def _drop(self, problem: Problem) -> None:
        work = self._left.pop(problem, 0.0)
        if problem in self._timed:
            self._done += work


GroupTuner = Callable[[Group, Sequence[int], SearchOptions, ScheduleCache], GroupSearch[GroupOutcome]]


@dataclass(frozen=True)
class Task:
    """A weight and the rows to tune it for, ascending."""

    group: Group
    ms: tuple[int, ...]
    search: GroupTuner = tune_group

    def problem(self, m: int) -> Problem:
        return Problem(self.group.family, self.group.format, self.group.n, self.group.k, m)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(map(self.problem, self.ms))

    @property
    def has_row_laws(self) -> bool:
        """True of a product; False of attention, whose one row and many are computed in unlike ways."""
        return self.group.family == "gemm"

    def part(self, ms: tuple[int, ...], arithmetic: Arithmetic) -> Task:
        """The same task for some of its rows, in one of its arithmetics."""
        return replace(self, group=replace(self.group, arithmetics=(arithmetic,)), ms=ms)


def known_results(tasks: Sequence[Task], task: Task, ledger: Ledger) -> ScheduleCache:
    """The results of other weights that the task's search may learn from."""
    begun_ms = begun_at_ms(task, ledger)
    others = [other for other in tasks if other.problems != task.problems]
    settled = [(ledger.settled_ms(other.problems), other) for other in others]
    cache = ScheduleCache()
    for ended_ms, other in sorted(settled, key=lambda pair: pair[0]):
        if ended_ms <= begun_ms and ended_ms < math.inf:
            cache.add(other.group, _found(other, begun_ms, ledger))
    return cache


def _found(task: Task, at_ms: float, ledger: Ledger) -> GroupOutcome:
    """The outcome of a settled task: the schedules in use at that time."""
    used = {m: ledger.in_use(task.problem(m), at_ms) for m in task.ms}
    arithmetic = arithmetic_of(max(used.values(), key=lambda verdict: verdict.origin.created_at_ms).schedule)
    best = {
        m: verdict.schedule for m, verdict in used.items() if arithmetic_of(verdict.schedule) == arithmetic
    }
    return GroupOutcome(arithmetic, best, ())


def begun_at_ms(task: Task, ledger: Ledger) -> float:
    """Unix time at which the first of a task's samples was stored; infinite: it is not begun."""
    begun_ms = ledger.begun_ms(task.problems)
    return math.inf if begun_ms is None else begun_ms
