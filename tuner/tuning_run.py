"""One tuning run: each weight is searched over its rows m, and the winners are compared with the schedules in
use.

Searches decide what to time, an evaluator times it, the ledger stores it; this module decides the order and
the end:

- *Resuming is replaying.* The search begins anew and asks the same questions; what the ledger holds is
  answered at once. So only the timing in flight is lost, and a second run times nothing. Seeds from other
  weights are part of the question (`known_results`): a weight that was begun before another was settled goes
  on without the other's results.
- *Fast is not yet better.* The winner of a search was the luckiest of many. It is taken into use only if a
  duel (`timing.duel`) proves it faster than the schedule in use, at first the kernels' default. A win of the
  default is a verdict too, so that no neighbour's schedule is used there.
- *One arithmetic for a weight.* Where the search found another arithmetic than the one in use, all m change
  or none.
- *Cliffs first.* Numbers of rows whose default schedule breaks a law of rows (`breaking`) are searched and
  settled before the others of the weight, so that a run that is cut short has done them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from phasewise.kerneldb.records import Comparison, Problem, Promotion, Sample, Schedule
from phasewise.tuner.conditions import is_disturbed, mean_conditions
from phasewise.tuner.ledger import Ledger, MeasuredRatio, ScheduleInUse, in_use_after, reversed_comparison
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.nearest import Seeds
from phasewise.tuner.search.group import GroupOutcome
from phasewise.tuner.search.protocol import SearchOptions, TimingBatch
from phasewise.tuner.search.space import Arithmetic, arithmetic_of
from phasewise.tuner.task_division import MOST_ROWS, Pace, Task, begun_at_ms, breaking, known_results
from phasewise.tuner.timing import PAIRS, ROUNDS, Duel

INTERLEAVED = 12
"""Schedules that are timed in turns and stored together: a killed run loses at most one such batch."""

DUEL_SHARE = 0.1
"""Part of a weight's share of the budget that is reserved for its duels."""

TIMINGS_A_DUEL = 2 * PAIRS // ROUNDS
"""Timings of one schedule that take as long as a duel."""

HOPELESS = 1.1
"""A hint slower than the schedule in use by this factor is not compared in a duel."""

End = Literal["complete", "budget", "interrupted"]


class ScheduleEvaluator(Protocol):
    """An evaluator that times schedules; `tuner.native` is the real one."""

    def prepare(self, problem: Problem, schedules: Sequence[Schedule]) -> None:
        """Prepare the timing of these schedules, as far as that does not disturb other measurements."""
        ...

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        """Time schedules in turns; returns one sample of each, in this order."""
        ...

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        """Time an incumbent and a candidate in pairs of turns."""
        ...


@dataclass(frozen=True)
class TuningProgress:
    task: Task
    task_number: int
    """The number of the present task, from 1."""
    task_count: int
    m: int
    timed: int
    """Schedules timed so far in this run."""
    elapsed_s: float
    left_s: float | None
    """Estimated seconds to the end of the work, within the budget; None: not known yet."""


@dataclass(frozen=True)
class Gain:
    """The schedule in use for a problem, and the kernels' own schedule for comparison."""

    problem: Problem
    schedule: Schedule
    default_ns: int
    tuned_ns: int
    is_default: bool
    comparison: Comparison
    """The schedule in use, compared with the loser of the last duel."""
    over_default: MeasuredRatio
    """The gain over the kernels' own schedule, by all duels that led to the schedule."""
    pace: float = 1.0
    """Pace of the cores while `tuned_ns` was taken, as a share of their best; limits were lower likewise."""


@dataclass(frozen=True)
class TuningOutcome:
    """The result of a run, complete or not."""

    end: End
    gains: tuple[Gain, ...]
    """Gains of the problems that have a verdict, from this run or an older one."""
    products: int
    """The number of products, one per m, that the run was asked to tune."""
    timed: int
    replayed: int
    """Answers that came from the database."""
    duels: int
    elapsed_s: float
    laps: int
    """The number of timed batches and duels."""
    disturbed: int
    """Laps in which other processes or guests took a noticeable share of the cores."""
    conditions: Mapping[str, float]
    """Mean conditions over all timings."""


@dataclass(frozen=True)
class Tools:
    """The tools of a run: its evaluator, ledger, clock, lock and reports."""

    evaluator: ScheduleEvaluator
    ledger: Ledger
    options: SearchOptions = field(default_factory=SearchOptions)
    report: Callable[[TuningProgress], None] = lambda _: None
    call_s: Callable[[Problem], float] = lambda _: 0.0
    """Approximate seconds of a call of a product, to estimate the time left."""
    clock: Callable[[], float] = time.monotonic
    worth: Callable[[Task], float] | None = None
    """The share of the budget that a task deserves, in any unit; None: each task takes what it needs."""
    lock: MeasurementLock = field(default_factory=MeasurementLock)
    seeds: Seeds = lambda _: ()
    """Schedules with which a product's search begins, e.g. of the nearest kinds of machine."""


def tune(tasks: Sequence[Task], tools: Tools, budget_s: float) -> TuningOutcome:
    """Tune every task in turn for at most `budget_s`. Ctrl-C ends the run early and keeps its results."""
    run = _Run(tasks, tools, budget_s)
    end: End = "complete"
    try:
        if not run.tune_all():
            end = "budget"
    except KeyboardInterrupt:
        end = "interrupted"
    return run.outcome(end)


@dataclass(frozen=True)
class Hinted:
    """Schedules, by m, that won elsewhere for products of one weight, all in one arithmetic."""

    task: Task
    schedules: Mapping[int, Schedule]


@dataclass(frozen=True)
class HintsOutcome:
    """The result of timing hints, in numbers of products."""

    asked: int
    timed: int
    """Products whose hint was timed on this machine."""
    promoted: int
    """Products whose hint is in use now."""
    elapsed_s: float


def settle_hints(hinted: Sequence[Hinted], tools: Tools, budget_s: float) -> HintsOutcome:
    """Time hints, in order, beside the schedules in use, for at most `budget_s`. A hint comes into use if a
    duel proves it faster. Ctrl-C ends it, and is raised to the caller."""
    run = _Run([hint.task for hint in hinted], tools, budget_s)
    done = [hint for hint in hinted if run.settle_hint(hint)]
    promoted = 0
    for hint in done:
        problems = {m: tools.ledger.verdicts(hint.task.problem(m)) for m in hint.schedules}
        promoted += sum(bool(v) and v[-1].schedule == hint.schedules[m] for m, v in problems.items())
    return HintsOutcome(
        sum(len(hint.schedules) for hint in hinted),
        sum(len(hint.schedules) for hint in done),
        promoted,
        run.outcome("complete").elapsed_s,
    )


class _Run:
    def __init__(self, tasks: Sequence[Task], tools: Tools, budget_s: float) -> None:
        self._tasks = tasks
        self._tools = tools
        self._started_s = tools.clock()
        self._deadline_s = self._started_s + budget_s
        self._pace = Pace(tasks, tools.call_s)
        self._worth = tools.worth or self._pace.work_of
        self._timed = self._replayed = self._duels = 0
        self._answered = set[tuple[Problem, Schedule, int]]()
        """Answers that this run got, since the rows that break a law are asked for again with all others."""
        self._timing_s = 0.0
        self._laps: list[Mapping[str, float]] = []

    def tune_all(self) -> bool:
        """Tune every task; False if the budget did not suffice. A task that its share cuts short continues
        with what others leave of their shares."""
        left, done = self._pass(self._tasks), -1
        while left and self._timed + self._duels > done and self._tools.clock() < self._deadline_s:
            done = self._timed + self._duels
            left = self._pass(left)
        return not left

    def settle_hint(self, hinted: Hinted) -> bool:
        """Time one weight's hints; False if there was no time, or the hints may not come into use."""
        if self._tools.clock() >= self._deadline_s or not self._may_change(hinted):
            return False
        task, hope = hinted.task, 0.0
        for m, schedule in hinted.schedules.items():
            problem, incumbent = task.problem(m), _in_use(task, m, self._tools.ledger)
            if schedule != incumbent and not self._measure(problem, [incumbent, schedule]):
                return False
            samples = self._tools.ledger.samples(problem)
            if schedule != incumbent:
                old, new = samples[incumbent][-1], samples[schedule][-1]
                hope += math.log(old.estimate_ns / new.estimate_ns)
        if hope / len(hinted.schedules) > -math.log(HOPELESS):
            self._settle(task, hinted.schedules, self._deadline_s)
        return True

    def _may_change(self, hinted: Hinted) -> bool:
        """True if the hint may come into use: a weight with verdicts keeps its arithmetic, since hints in
        another one cover only some of its rows."""
        ledger, task = self._tools.ledger, hinted.task
        arithmetic = arithmetic_of(next(iter(hinted.schedules.values())))
        has_verdicts = any(ledger.verdicts(task.problem(m)) for m in task.ms)
        return not has_verdicts or arithmetic == _arithmetic_in_use(task, ledger)

    def _pass(self, tasks: Sequence[Task]) -> list[Task]:
        """Tune each task once, begun ones first, within its share of the budget left; returns incomplete
        tasks."""
        waiting, cut = list(tasks), list[Task]()
        waiting.sort(key=lambda task: begun_at_ms(task, self._tools.ledger))
        while waiting:
            task, whole = waiting[0], sum(map(self._worth, waiting))
            if self._tune(task, self._worth(task) / whole):
                self._pace.finish(task)
            else:
                cut.append(task)
            waiting.remove(task)
        return cut

    def _tune(self, task: Task, share: float) -> bool:
        """Search and settle one task; False if its share of the remaining time did not suffice."""
        number, now_s = self._tasks.index(task), self._tools.clock()
        share_s = max(0.0, self._deadline_s - now_s) * share
        search_end_s, end_s = now_s + (1 - DUEL_SHARE) * share_s, now_s + share_s
        cliffs = self._cliffs(number, task, search_end_s)
        if cliffs is not None:
            self._search_and_settle(number, cliffs, search_end_s, end_s)
        return self._search_and_settle(number, task, search_end_s, end_s)

    def _cliffs(self, number: int, task: Task, deadline_s: float) -> Task | None:
        """The rows of a task whose default schedules break a law of rows, by one timing of each. None if
        there are none, or the weight has left its default arithmetic, so that all rows have been searched."""
        own, times = task.group.arithmetics[0], dict[int, float]()
        if not task.has_row_laws or _arithmetic_in_use(task, self._tools.ledger) != own:
            return None
        for m in (n_rows for n_rows in task.ms if n_rows <= MOST_ROWS):
            default = task.group.space(m, own).fitted(task.group.default(m))
            samples = self._answer(number, task, TimingBatch(m, (default,), (0,)), deadline_s)
            if samples is None:
                return None
            times[m] = samples[0].estimate_ns
        rows = breaking(times)
        return task.part(rows, own) if rows else None

    def _search_and_settle(self, number: int, task: Task, search_end_s: float, end_s: float) -> bool:
        """Search a task and settle its results; False if there was no time for all of it."""
        outcome = self._search(number, task, search_end_s)
        best = self._best_so_far(task) if outcome is None else outcome.best
        settled = self._settle(task, best, end_s)
        return outcome is not None and settled

    def _is_over(self, deadline_s: float) -> bool:
        return self._tools.clock() >= min(deadline_s, self._deadline_s)

    def _turn(self) -> AbstractContextManager[bool]:
        return self._tools.lock.turn(self._deadline_s - self._tools.clock())

    def outcome(self, end: End) -> TuningOutcome:
        return TuningOutcome(
            end=end,
            gains=tuple(gain for task in self._tasks for gain in gains_of(task, self._tools.ledger)),
            products=sum(len(task.ms) for task in self._tasks),
            timed=self._timed,
            replayed=self._replayed,
            duels=self._duels,
            elapsed_s=self._tools.clock() - self._started_s,
            laps=len(self._laps),
            disturbed=sum(map(is_disturbed, self._laps)),
            conditions=mean_conditions(self._laps),
        )

    def _search(self, number: int, task: Task, deadline_s: float) -> GroupOutcome | None:
        """Search a task's products; None if the deadline came first."""
        cache = known_results(self._tasks, task, self._tools.ledger)
        for m in task.ms:
            cache.offer(task.group, m, self._tools.seeds(task.problem(m)))
        search = task.search(task.group, task.ms, self._tools.options, cache)
        try:
            ask = next(search)
            while True:
                timed = self._timed
                samples = self._answer(number, task, ask, deadline_s)
                self._pace.reach(task, ask.m, timed=self._timed > timed)
                if samples is None:
                    search.close()
                    return None
                ask = search.send(samples)
        except StopIteration as end:
            outcome: GroupOutcome = end.value
            return outcome

    def _answer(self, number: int, task: Task, ask: TimingBatch, deadline_s: float) -> list[Sample] | None:
        problem, ledger = task.problem(ask.m), self._tools.ledger
        if self._missing(problem, ask):
            ledger.refresh(problem)
        absent = self._missing(problem, ask)
        start = 0
        while start < len(absent):
            batch = absent[start : start + self._n_that_fit(problem)]
            if not batch or self._is_over(deadline_s) or not self._measure(problem, batch):
                return None
            start += len(batch)
            self._report(number, task, ask.m)
        new = {(problem, *asked) for asked in zip(ask.schedules, ask.takes, strict=True)} - self._answered
        self._replayed += len(new) - len(absent)
        self._answered |= new
        samples = ledger.samples(problem)
        return [samples[schedule][take] for schedule, take in zip(ask.schedules, ask.takes, strict=True)]

    def _missing(self, problem: Problem, ask: TimingBatch) -> list[Schedule]:
        samples = self._tools.ledger.samples(problem)
        asked = zip(ask.schedules, ask.takes, strict=True)
        return [schedule for schedule, take in asked if take >= len(samples.get(schedule, ()))]

    def _n_that_fit(self, problem: Problem) -> int:
        """The number of schedules whose timing fits into the remaining budget; 1 while no time is known."""
        expected_s = self._pace.timing_s(problem)
        if not expected_s:
            return 1 if expected_s is None else INTERLEAVED
        left_s = self._deadline_s - self._tools.clock()
        return max(0, min(INTERLEAVED, int(left_s / expected_s)))

    def _measure(self, problem: Problem, schedules: Sequence[Schedule]) -> bool:
        """Time these schedules and store their samples; False if other processes timed until the budget's
        end."""
        started_s = self._tools.clock()
        self._tools.evaluator.prepare(problem, schedules)
        with self._turn() as is_alone:
            if not is_alone:
                return False
            samples = self._tools.evaluator.measure(problem, schedules)
        self._pace.time(problem, len(samples), self._tools.clock() - started_s)
        self._tools.ledger.add(problem, samples)
        self._timed += len(samples)
        self._timing_s += self._tools.clock() - started_s
        self._laps.append(samples[0].conditions)
        return True

    def _report(self, number: int, task: Task, m: int) -> None:
        now_s = self._tools.clock()
        left_s = self._pace.left_s(self._timing_s)
        if left_s is not None:
            left_s = min(left_s, max(0.0, self._deadline_s - now_s))
        self._tools.report(
            TuningProgress(
                task, number + 1, len(self._tasks), m, self._timed, now_s - self._started_s, left_s
            )
        )

    def _best_so_far(self, task: Task) -> dict[int, Schedule]:
        """The fastest schedule so far for each m of an unfinished search, in the arithmetic in use."""
        arithmetic = _arithmetic_in_use(task, self._tools.ledger)
        best = ((m, self._fastest(task.problem(m), arithmetic)) for m in task.ms)
        return {m: schedule for m, schedule in best if schedule is not None}

    def _fastest(
        self, problem: Problem, arithmetic: Arithmetic, but: Schedule | None = None
    ) -> Schedule | None:
        """The fastest schedule of a problem, except `but`, by each schedule's first sample."""
        by_schedule = self._tools.ledger.samples(problem)
        costs = {
            schedule: samples[0].estimate_ns
            for schedule, samples in by_schedule.items()
            if arithmetic_of(schedule) == arithmetic and schedule != but
        }
        return min(costs, key=lambda schedule: costs[schedule], default=None)

    def _settle(self, task: Task, best: Mapping[int, Schedule], deadline_s: float) -> bool:
        """Duel the found schedules with those in use; False if there was no time for all duels."""
        in_use = _arithmetic_in_use(task, self._tools.ledger)
        if any(arithmetic_of(schedule) != in_use for schedule in best.values()):
            if self._switch(task, best, deadline_s):
                return True
            best = self._best_so_far(task)
        settled = [self._settle_one(task, m, schedule, deadline_s) for m, schedule in best.items()]
        return all(settled) and len(best) == len(task.ms)

    def _settle_one(self, task: Task, m: int, best: Schedule, deadline_s: float) -> bool:
        """Duel the schedule found for m unless it is judged; False if there was no time for a due duel."""
        problem, ledger = task.problem(m), self._tools.ledger
        incumbent = _in_use(task, m, ledger)
        candidate: Schedule | None = best
        if best == incumbent and not ledger.verdicts(problem):
            # The default was found best: a duel with the next best confirms it.
            candidate = self._fastest(problem, arithmetic_of(incumbent), but=incumbent)
        if candidate is None or _is_judged(problem, candidate, ledger):
            return True
        comparison = self._duel(problem, incumbent, candidate, deadline_s)
        if comparison is None:
            return False
        if comparison.proves_faster:
            ledger.add_verdict(problem, candidate, incumbent, comparison)
        else:
            ledger.add_verdict(problem, incumbent, candidate, reversed_comparison(comparison))
        return True

    def _switch(self, task: Task, best: Mapping[int, Schedule], deadline_s: float) -> bool:
        """Change the weight to the arithmetic of `best` if that gains over all m together and does not slow
        the fewest rows down; True if it was changed."""
        ledger = self._tools.ledger
        if all(_is_judged(task.problem(m), schedule, ledger) for m, schedule in best.items()):
            return False
        duels: dict[int, tuple[Schedule, Comparison]] = {}
        for m, candidate in best.items():
            incumbent = _in_use(task, m, ledger)
            comparison = self._duel(task.problem(m), incumbent, candidate, deadline_s)
            if comparison is None:
                return False
            duels[m] = incumbent, comparison
        log_gain = sum(math.log(comparison.gain) for _, comparison in duels.values()) / len(duels)
        options, (_, fewest_rows) = self._tools.options, duels[min(duels)]
        gains = log_gain > math.log1p(options.switch_gain) and fewest_rows.gain >= options.fewest_rows_keep
        for m, (incumbent, comparison) in duels.items():
            problem = task.problem(m)
            if gains:
                ledger.add_verdict(problem, best[m], incumbent, comparison)
            else:
                ledger.add_verdict(problem, incumbent, best[m], reversed_comparison(comparison))
        return gains

    def _duel(
        self, problem: Problem, incumbent: Schedule, candidate: Schedule, deadline_s: float
    ) -> Comparison | None:
        """Run a duel and store its verdict; None: there is no time."""
        expected_s = TIMINGS_A_DUEL * (self._pace.timing_s(problem) or 0.0)
        if self._is_over(deadline_s) or self._tools.clock() + expected_s > self._deadline_s:
            return None
        started_s = self._tools.clock()
        self._tools.evaluator.prepare(problem, (incumbent, candidate))
        with self._turn() as is_alone:
            if not is_alone:
                return None
            fought = self._tools.evaluator.duel(problem, incumbent, candidate)
        self._pace.time(problem, TIMINGS_A_DUEL, self._tools.clock() - started_s)
        self._tools.ledger.add(problem, [fought.incumbent, fought.candidate])
        self._duels += 1
        self._laps.append(fought.candidate.conditions)
        return fought.comparison


def gains_of(task: Task, ledger: Ledger) -> list[Gain]:
    """The schedule in use for each m with a verdict, beside the default, by the newest samples of both."""
    gains = []
    for m in task.ms:
        problem = task.problem(m)
        verdicts, samples = ledger.verdicts(problem), ledger.samples(problem)
        if not verdicts or verdicts[-1].schedule not in samples:
            continue
        last = verdicts[-1]
        own = task.group.default(m)
        # In another arithmetic than its own, where the weight had changed to that before this m was tuned.
        defaults = [
            schedule
            for schedule in (own, _in_arithmetic(own, arithmetic_of(last.schedule)))
            if schedule in samples
        ]
        if defaults:
            gains.append(
                Gain(
                    problem,
                    last.schedule,
                    samples[defaults[0]][-1].estimate_ns,
                    samples[last.schedule][-1].estimate_ns,
                    last.schedule in defaults,
                    last.comparison,
                    _over_default(verdicts, defaults),
                    samples[last.schedule][-1].conditions.get("pace", 1.0),
                )
            )
    return gains


def _over_default(verdicts: Sequence[Promotion], defaults: Sequence[Schedule]) -> MeasuredRatio:
    standing: ScheduleInUse | None = None
    for won in verdicts:
        standing = in_use_after(standing, won, lambda _, schedule: schedule in defaults)
    return MeasuredRatio() if standing is None else standing.gain


def _in_use(task: Task, m: int, ledger: Ledger) -> Schedule:
    """The schedule in use for m: the last duel's winner, else the default in the weight's arithmetic."""
    verdicts = ledger.verdicts(task.problem(m))
    arithmetic = _arithmetic_in_use(task, ledger)
    if verdicts and arithmetic_of(verdicts[-1].schedule) == arithmetic:
        return verdicts[-1].schedule
    return _in_arithmetic(task.group.default(m), arithmetic)


def _in_arithmetic(schedule: Schedule, arithmetic: Arithmetic) -> Schedule:
    return replace(schedule, compute_path=arithmetic.compute_path, k_parts=arithmetic.k_parts)


def _arithmetic_in_use(task: Task, ledger: Ledger) -> Arithmetic:
    """The arithmetic of the weight's newest verdict; the default arithmetic without a verdict."""
    newest = [verdicts[-1] for m in task.ms if (verdicts := ledger.verdicts(task.problem(m)))]
    if not newest:
        return task.group.arithmetics[0]
    return arithmetic_of(max(newest, key=lambda verdict: verdict.origin.created_at_ms).schedule)


def _is_judged(problem: Problem, candidate: Schedule, ledger: Ledger) -> bool:
    """True if this schedule has fought a duel for the problem."""
    return any(candidate in (verdict.schedule, verdict.incumbent) for verdict in ledger.verdicts(problem))
