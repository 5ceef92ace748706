"""The tasks of a tuning run: weights and the rows to tune them for, what each may learn from others, and
their pace.

A search may learn from other weights' schedules in use only if those weights were settled before it began, by
the database alone. So a run that asks again asks the same.

Products obey two laws of rows, for the time t(m) of m rows, within an allowance: more rows never cost less,
and no product is slower than two smaller ones, t(a + b) <= t(a) + t(b). `breaking` names the rows that break
a law.

`Pace` estimates the share of a run's work that is done, and the time left."""

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
"""The most rows for which the laws are checked: one row more is one more sequence or drafted token."""

ALLOWANCE = 0.05
"""The allowed excess over a ratio of 1: two timings of one product differ by as much on a quiet machine."""


class Breach(NamedTuple):
    """A law's ratio of two sides, with the rows of the dearer side and of the other side."""

    ratio: float
    dearer: int
    others: tuple[int, ...]


def breaking(times: Times, allowance: float = ALLOWANCE) -> tuple[int, ...]:
    """The numbers of rows whose products break a law, ascending."""
    both = (*beside_more(times), *beside_two(times))
    return tuple(sorted({breach.dearer for breach in both if breach.ratio > 1 + allowance}))


def beside_more(times: Times) -> Iterator[Breach]:
    """Yield each pair of products of which the second has more rows, with the ratio of their times."""
    return (Breach(times[m] / times[more], m, (more,)) for m in times for more in times if more > m)


def beside_two(times: Times) -> Iterator[Breach]:
    """Yield each product with any two that divide its rows; the ratio is of its time to the sum of theirs."""
    cuts = ((a, m - a) for m in times for a in times if a <= m - a and m - a in times)
    return (Breach(times[a + b] / (times[a] + times[b]), a + b, (a, b)) for a, b in cuts)


CALLS_A_TIMING = 6
SHORTEST_TIMING_S = 0.008


class Pace:
    """The share of a run's work that is done, weighted by products; replayed products count as no work."""

    def __init__(self, tasks: Sequence[Task], call_s: Callable[[Problem], float]) -> None:
        """`call_s`: approximate seconds of one call of a product."""
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
        """By problem, the number of timings and their seconds; under None the total work and its seconds."""

    def work_of(self, task: Task) -> float:
        """The approximate duration of a task, in units of its shortest timings."""
        return sum(self._work[problem] for problem in task.problems)

    def reach(self, task: Task, m: int, timed: bool) -> None:
        """Record that a task's search asks for m; an m is done once the next one is asked for."""
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
        """Estimated seconds of the remaining work, if the work so far took `timing_s`; None before any
        product is done."""
        return timing_s * sum(self._left.values()) / self._done if self._done else None

    def time(self, problem: Problem, n_timings: int, seconds: float) -> None:
        """Record timings that have ended."""
        for key in (problem, None):
            n, so_far_s = self._times.get(key, (0.0, 0.0))
            work = n_timings if key else n_timings * self._work[problem]
            self._times[key] = n + work, so_far_s + seconds

    def timing_s(self, problem: Problem) -> float | None:
        """The expected seconds of one timing: the problem's mean, else by its work; None: not known."""
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
        """True for products; False for attention, which computes one row and many in different ways."""
        return self.group.family == "gemm"

    def part(self, ms: tuple[int, ...], arithmetic: Arithmetic) -> Task:
        """The task for some of its rows, in one of its arithmetics."""
        return replace(self, group=replace(self.group, arithmetics=(arithmetic,)), ms=ms)


def known_results(tasks: Sequence[Task], task: Task, ledger: Ledger) -> ScheduleCache:
    """The results of other weights from which the task's search may learn."""
    begun_ms = begun_at_ms(task, ledger)
    others = [other for other in tasks if other.problems != task.problems]
    settled = [(ledger.settled_ms(other.problems), other) for other in others]
    cache = ScheduleCache()
    for ended_ms, other in sorted(settled, key=lambda pair: pair[0]):
        if ended_ms <= begun_ms and ended_ms < math.inf:
            cache.add(other.group, _found(other, begun_ms, ledger))
    return cache


def _found(task: Task, at_ms: float, ledger: Ledger) -> GroupOutcome:
    """The outcome of a settled task: the schedules in use at `at_ms`."""
    used = {m: ledger.in_use(task.problem(m), at_ms) for m in task.ms}
    arithmetic = arithmetic_of(max(used.values(), key=lambda verdict: verdict.origin.created_at_ms).schedule)
    best = {
        m: verdict.schedule for m, verdict in used.items() if arithmetic_of(verdict.schedule) == arithmetic
    }
    return GroupOutcome(arithmetic, best, ())


def begun_at_ms(task: Task, ledger: Ledger) -> float:
    """Unix ms at which the first of a task's samples was stored; infinite: the task has not begun."""
    begun_ms = ledger.begun_ms(task.problems)
    return math.inf if begun_ms is None else begun_ms
