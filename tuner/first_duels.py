"""The order in which schedules that won on other machines (hints) are tried on this one: most seconds at
stake first.

A hint's claimed gain is not trusted: its worth is the least time that a product takes on these cores, times
its uses in a step. At the load of one conversation a step has the fewest rows or the most, so these numbers
of rows come before those between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phasewise.kerneldb.hints import Hints
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.tuner.search.space import arithmetic_of
from phasewise.tuner.task_division import Task
from phasewise.tuner.tuning_run import Hinted

FIRST_S = 60.0
"""The most seconds spent on hints before a server's start, and at the beginning of a tuning run."""
FIRST_SHARE = 0.5
"""The largest share of a tuning run's budget spent on hints."""


def in_order_of_worth(
    tasks: Sequence[Task],
    hints: Hints,
    obstacle: Callable[[Problem, Schedule], str | None],
    step_s: Callable[[Problem], float],
) -> list[Hinted]:
    """Hints for these tasks that can run on this machine and are not the default, most seconds at stake
    first. `step_s`: seconds of a product in a step. A hint in the default arithmetic is tried alone; hints
    for a weight in another one are tried together, since they change all of its rows or none."""
    hinted = [hint for task in tasks for hint in _hinted(task, hints, obstacle)]

    def worth(hint: Hinted) -> tuple[bool, float]:
        ends = {hint.task.ms[0], hint.task.ms[-1]}
        seconds = sum(step_s(hint.task.problem(m)) for m in hint.schedules)
        return ends.isdisjoint(hint.schedules), -seconds

    return sorted(hinted, key=worth)


def _hinted(
    task: Task, hints: Hints, obstacle: Callable[[Problem, Schedule], str | None]
) -> Iterator[Hinted]:
    schedules = {
        m: hints[problem].schedule
        for m, problem in zip(task.ms, task.problems, strict=True)
        if problem in hints
        and hints[problem].schedule != task.group.default(m)
        and obstacle(problem, hints[problem].schedule) is None
    }
    if not schedules:
        return
    arithmetic = arithmetic_of(next(iter(schedules.values())))
    if arithmetic == task.group.arithmetics[0]:
        yield from (Hinted(task, {m: schedule}) for m, schedule in schedules.items())
    elif arithmetic in task.group.arithmetics:
        yield Hinted(task, schedules)
