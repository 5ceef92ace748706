"""Runs that share a database divide its weights, and learn from each other's: what is whose, what is known.

Runs on one machine know of each other (`Company`). A weight is one run's until it is done with it. The others
leave it alone, take it as it is when all its rows have verdicts, and go on with it otherwise: its run died,
or had no time left.

What a search may learn from other weights follows from the database alone: what was in use for those that
were settled when the weight was begun. So whoever asks again, asks the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from phasewise.kerneldb.records import Problem
from phasewise.tuner.ledger import Ledger
from phasewise.tuner.search.group import Group, GroupOutcome, ScheduleCache, tune_group
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.search.protocol import GroupSearch
from phasewise.tuner.search.space import arithmetic_of

PAUSE_S = 0.02

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


class Company(Protocol):
    """Other runs on this machine with the same database."""

    def turn(self) -> AbstractContextManager[bool]:
        """Nobody else times or works until its end; False: there was no time to wait for that."""
        ...

    def let_pass(self) -> None:
        """Whoever waits for a turn has it now."""
        ...

    def claim(self, name: str) -> AbstractContextManager[bool]:
        """Whether what has this name is this run's until the end; False: it is another's."""
        ...

    def wait_for(self, name: str, seconds: float) -> None:
        """Sleep, in nobody's way, until nobody has claimed this, or so long."""
        ...


class Nobody:
    """No company."""

    def turn(self) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def let_pass(self) -> None:
        pass

    def claim(self, name: str) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def wait_for(self, name: str, seconds: float) -> None:
        time.sleep(min(seconds, PAUSE_S))


class TaskDivision:
    """Which of its tasks a run takes next, and what others make of them."""

    def __init__(
        self, tasks: Sequence[Task], ledger: Ledger, company: Company, work_of: Callable[[Task], float]
    ) -> None:
        self._tasks = tasks
        self._ledger = ledger
        self._company = company
        self._work_of = work_of
        self._elsewhere: set[str] = set()
        """What others had claimed at some time."""
        self._looked_at: set[str] = set()
        self._own: set[str] = set()
        """What this run has worked at."""
        self._began_ms = time.time_ns() // 1_000_000

    @contextmanager
    def take(self, waiting: Sequence[Task]) -> Iterator[Task | None]:
        """One that is nobody else's until the end; None: all are others'."""
        left = self._in_turn(waiting)
        while left:
            task = left.pop(0)
            with self._company.claim(self._name(task)) as is_ours:
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
        """At what others may have stored since its rows were read; nobody but this run will from now on."""
        if self._name(task) not in self._looked_at:
            self._ledger.forget(task.problems)
            self._looked_at.add(self._name(task))

    def wait(self, waiting: Sequence[Task], seconds: float) -> None:
        """Until one of them may be nobody's any more, or so long."""
        self._company.wait_for(self._name(waiting[0]), seconds)

    def share(self, task: Task, waiting: Sequence[Task]) -> float:
        """Share of the work left to this run that `task` is, 0 to 1."""
        ours = [one for one in waiting if self._name(one) not in self._elsewhere]
        whole = sum(map(self._work_of, ours))
        return self._work_of(task) / whole if task in ours else 1 / len(waiting)

    def is_settled_elsewhere(self, task: Task) -> bool:
        """Whether another run had it since this one began, and has come to a verdict for all its rows."""
        settled_ms = self._ledger.settled_ms(task.problems)
        if self._name(task) in self._elsewhere:
            return settled_ms < math.inf
        return self._name(task) not in self._own and self._began_ms <= settled_ms < math.inf

    def known(self, task: Task) -> ScheduleCache:
        """What its search may learn from other weights."""
        begun_ms = self._begun_ms(task)
        others = [one for one in self._tasks if one.problems != task.problems]
        settled = [(self._ledger.settled_ms(one.problems), one) for one in others]
        found = ScheduleCache()
        for ended_ms, one in sorted(settled, key=lambda pair: pair[0]):
            if ended_ms <= begun_ms and ended_ms < math.inf:
                found.add(one.group, self._found(one, begun_ms))
        return found

    def _found(self, task: Task, at_ms: float) -> GroupOutcome:
        """The outcome of a settled task: the schedules in use at that time."""
        used = {m: self._ledger.in_use(task.problem(m), at_ms) for m in task.ms}
        arithmetic = arithmetic_of(
            max(used.values(), key=lambda verdict: verdict.origin.created_at_ms).schedule
        )
        best = {m: one.schedule for m, one in used.items() if arithmetic_of(one.schedule) == arithmetic}
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
        """When the first of a task's samples was stored; infinite: it is not begun."""
        begun_ms = self._ledger.begun_ms(task.problems)
        return math.inf if begun_ms is None else begun_ms

    def _name(self, task: Task) -> str:
        group = task.group
        return f"{self._ledger.name} {group.family} {group.format} {group.n} {group.k} {group.threads}"
