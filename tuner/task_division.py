"""Work division between runs that share a database: which run tunes which weight.

Runs on one machine know of each other by a `MeasurementLock`. A run claims a weight until it is done with
it. The other runs leave that weight alone; afterwards they take its results if all its rows have verdicts,
and go on with it otherwise, because its run has died or had no time left.

What a search may learn from other weights depends on the database alone: the schedules in use for weights
that were settled before this one was begun. So a run that asks again asks the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from phasewise.kerneldb.records import Problem
from phasewise.tuner.ledger import Ledger
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.search.group import Group, GroupOutcome, ScheduleCache, tune_group
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.search.protocol import GroupSearch
from phasewise.tuner.search.space import Arithmetic, arithmetic_of

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


class TaskDivision:
    """The tasks that a run takes next, and the claims of other runs."""

    def __init__(
        self, tasks: Sequence[Task], ledger: Ledger, lock: MeasurementLock, work_of: Callable[[Task], float]
    ) -> None:
        self._tasks = tasks
        self._ledger = ledger
        self._lock = lock
        self._work_of = work_of
        self._elsewhere: set[str] = set()
        """The claims of other runs that were seen at some time."""
        self._looked_at: set[str] = set()
        self._own: set[str] = set()
        """The tasks that this run has worked at."""
        self._began_ms = time.time_ns() // 1_000_000

    @contextmanager
    def take(self, waiting: Sequence[Task]) -> Iterator[Task | None]:
        """A task that this process owns until the end; None: other processes own them all."""
        left = self._in_turn(waiting)
        while left:
            task = left.pop(0)
            with self._lock.claim(self._name(task)) as is_ours:
                if is_ours:
                    self._look_again(task)
                    yield task
                    self._own.add(self._name(task))
                    return
            self._looked_at.discard(self._name(task))
            if self._name(task) not in self._elsewhere:
                self._elsewhere.add(self._name(task))
                left = self._in_turn(left)
        yield None

    def _look_again(self, task: Task) -> None:
        """Look at rows that other processes stored since the last look; now only this run stores more."""
        if self._name(task) not in self._looked_at:
            self._ledger.forget(task.problems)
            self._looked_at.add(self._name(task))

    def wait(self, waiting: Sequence[Task], seconds: float) -> None:
        """Wait until a task may have lost its owner, or until the time is over."""
        self._lock.wait_for(self._name(waiting[0]), seconds)

    def share(self, task: Task, waiting: Sequence[Task]) -> float:
        """Share of what is left to this run that `task` deserves, 0 to 1."""
        ours = [waiting_task for waiting_task in waiting if self._name(waiting_task) not in self._elsewhere]
        whole = sum(map(self._work_of, ours))
        return self._work_of(task) / whole if task in ours else 1 / len(waiting)

    def is_settled_elsewhere(self, task: Task) -> bool:
        """True if another run has tuned the task since this run began, and has a verdict for all its rows."""
        settled_ms = self._ledger.settled_ms(task.problems)
        if self._name(task) in self._elsewhere:
            return settled_ms < math.inf
        return self._name(task) not in self._own and self._began_ms <= settled_ms < math.inf

    def known(self, task: Task) -> ScheduleCache:
        """The results of other weights that the task's search may learn from."""
        begun_ms = self._begun_ms(task)
        others = [other for other in self._tasks if other.problems != task.problems]
        settled = [(self._ledger.settled_ms(other.problems), other) for other in others]
        cache = ScheduleCache()
        for ended_ms, other in sorted(settled, key=lambda pair: pair[0]):
            if ended_ms <= begun_ms and ended_ms < math.inf:
                cache.add(other.group, self._found(other, begun_ms))
        return cache

    def _found(self, task: Task, at_ms: float) -> GroupOutcome:
        """The outcome of a settled task: the schedules in use at that time."""
        used = {m: self._ledger.in_use(task.problem(m), at_ms) for m in task.ms}
        arithmetic = arithmetic_of(
            max(used.values(), key=lambda verdict: verdict.origin.created_at_ms).schedule
        )
        best = {
            m: verdict.schedule
            for m, verdict in used.items()
            if arithmetic_of(verdict.schedule) == arithmetic
        }
        return GroupOutcome(arithmetic, best, ())

    def _in_turn(self, waiting: Sequence[Task]) -> list[Task]:
        """Tasks that other runs had claimed come first: they may be settled by now. Then begun tasks, the
        earliest first.

        With other runs on the machine, start the longest task first to shorten the tail.
        """
        theirs = [task for task in waiting if self._name(task) in self._elsewhere]
        begun = [(self._begun_ms(task), task) for task in waiting if self._name(task) not in self._elsewhere]
        if self._elsewhere:
            begun.sort(key=lambda pair: self._work_of(pair[1]), reverse=True)
        return theirs + [task for _, task in sorted(begun, key=lambda pair: pair[0])]

    def _begun_ms(self, task: Task) -> float:
        """Unix time at which the first of a task's samples was stored; infinite: it is not begun."""
        begun_ms = self._ledger.begun_ms(task.problems)
        return math.inf if begun_ms is None else begun_ms

    def _name(self, task: Task) -> str:
        group = task.group
        return f"{self._ledger.name} {group.family} {group.format} {group.n} {group.k} {group.threads}"
