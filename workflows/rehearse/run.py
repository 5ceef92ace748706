"""One rehearsal: step times, the best settings under the hour's requests, their gain, and one measured run.

Of a budget, at most half goes into timing steps and simulating. The rest is for the run that checks the
proposal, today's settings and the proposed ones one after the other under the same requests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.cluster.simulated.recorded_steps import TimedStep, steps_of
from phasewise.serving.pools.opening import DEFAULT_POLICY, POLICIES
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.scheduler_terms import DEFAULT_BATCH_TOKENS
from phasewise.workflows.config_file import StandingOptions
from phasewise.workflows.errors import UsageError
from phasewise.workflows.rehearse.hour import Hour, busiest_part, read_hour
from phasewise.workflows.rehearse.replayed import replayed
from phasewise.workflows.rehearse.timed_steps import resampled, timed_steps
from phasewise.workflows.rehearse.ways import (
    DEFAULT_PLAN,
    IN_USE,
    ServerRoom,
    ServerWay,
    Stage,
    best_way,
    merit,
)
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from pathlib import Path

    from phasewise.cluster.simulated.simulated_requests import Arrival
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.tuner.config.simulate import Objective
    from phasewise.tuner.measurement_lock import MeasurementLock
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.tune_config.subject import Wish

RESAMPLES = 6
TIMED_SHARE, SIMULATED_SHARE = 0.25, 0.5
"""Shares of the budget, by when steps are timed, and by when the proposal has to be there."""

LEAST_WINDOW_S, MOST_WINDOW_S = 2.0, 300.0
"""Bounds of the measured run, for each of the two settings."""

WINDOW_SHARE = 0.4
"""Share of the time that is left then: what is simulated to end in it may take longer."""

Timed = dict[str, list[TimedStep]]
"""By `ServerWay.plans`."""


@dataclass(frozen=True)
class Interval:
    """A gain over today's settings, with the ends of what other timings of the steps may have given."""

    gain: float
    low: float
    high: float

    @property
    def is_gain(self) -> bool:
        return self.low > 1.0


@dataclass(frozen=True)
class Check:
    """One measured run: the same requests by today's settings and by the proposed ones."""

    n_requests: int
    window_s: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measured gain."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Rehearsal:
    """The outcome. `proposed` is `today` where nothing gains; `check`: None where there was none."""

    objective: Objective
    hour: Hour
    today: ServerWay
    proposed: ServerWay
    today_merit: float
    expected: Interval
    check: Check | None
    tried: dict[ServerWay, float]
    source: str
    """Kind of the step times: measured, recorded or modelled."""
    remarks: tuple[str, ...]


def rehearse(log: Path, wish: Wish, started_s: float, lock: MeasurementLock, report: Report) -> Rehearsal:
    """The hour of `log`, by the step times of the wish's evaluator. TraceError, ClusterError, ModelError."""
    hour, today = read_hour(log, report), todays_way()
    deadline_s = started_s + wish.budget_s

    def is_over(share: float = SIMULATED_SHARE) -> bool:
        return time.monotonic() > started_s + share * wish.budget_s

    if wish.evaluator != "measured":
        from phasewise.workflows.rehearse.other_steps import calculated_steps

        timed, room = calculated_steps(wish, hour, report)
        return _proposed(hour, today, timed, room, wish, is_over, report)
    from phasewise.workflows.opening.open_model import Weights, open_model

    opened_model = open_model(wish.model, Weights(wish.weight_format), db=wish.db, report=report)
    hour = hour.fitted(opened_model.model.config.context_length)
    plans = _plans_of(opened_model)
    with lock.turn(wish.budget_s):
        report("timing the model's steps ...")
        timed = {}
        for name, planned_model in plans.items():
            with _engine(planned_model, today, hour) as opened:
                share = TIMED_SHARE * (len(timed) + 1) / len(plans)
                timed[name] = timed_steps(opened, is_over=partial(is_over, share))
                room = ServerRoom(opened.size.kv.slots, opened.size.limits.max_sequences)
        rehearsal = _proposed(hour, today, timed, room, wish, is_over, report)
        if rehearsal.proposed == rehearsal.today:
            return rehearsal
        return replace(rehearsal, check=_checked(rehearsal, plans, timed, room, deadline_s, report))


def todays_way() -> ServerWay:
    """The settings of `serve`, as variables and the configuration file say; UsageError for wrong ones."""
    options = StandingOptions.of("serve")
    text = options.text("tpot")
    try:
        tpot_ms = DEFAULT_TPOT_MS if text is None else float(text)
    except ValueError:
        raise UsageError(f"tpot is {text!r:.40}, not a number of milliseconds") from None
    return ServerWay(
        kv_policy=options.text("kv_policy", tuple(POLICIES)) or DEFAULT_POLICY,
        tpot_ms=tpot_ms,
        batch_tokens=options.count("max_batch_tokens") or DEFAULT_BATCH_TOKENS,
    )


def _plans_of(opened_model: OpenModel) -> dict[str, OpenModel]:
    """The plans in use, and beside stored ones the default plans."""
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan

    machine = read_machine()
    defaults = {phase: default_plan(machine, phase) for phase in opened_model.plans}
    if all(plan.ranks == defaults[phase].ranks for phase, plan in opened_model.plans.items()):
        return {IN_USE: opened_model}
    return {IN_USE: opened_model, DEFAULT_PLAN: replace(opened_model, plans=defaults)}


def _engine(opened_model: OpenModel, way: ServerWay, hour: Hour) -> OpenEngine:
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import open_engine
    from phasewise.serving.scheduling.scheduler_terms import DEFAULT_SEQUENCES

    size = EngineSize.for_many(opened_model.model, DEFAULT_SEQUENCES, None, None)
    limits = replace(size.limits, prefix_reuse=False, max_batch_tokens=way.batch_tokens)
    size = replace(
        size, limits=limits, kv=replace(size.kv, touched=True), kv_policy=way.kv_policy, tpot_ms=way.tpot_ms
    )
    return open_engine(opened_model.model, opened_model.plans, size, schedules=opened_model.schedules)


def _proposed(
    hour: Hour,
    today: ServerWay,
    timed: Timed,
    room: ServerRoom,
    wish: Wish,
    is_over: Callable[[], bool],
    report: Report,
) -> Rehearsal:
    stage = Stage({name: steps_of(rows) for name, rows in timed.items()}, room, wish.objective)
    report(f"simulating {counted(len(hour.arrivals), 'request')} ...")
    best, tried = best_way(stage, today, hour.arrivals, is_over)
    expected = Interval(1.0, 1.0, 1.0)
    if best != today:
        expected = _interval(tried[best] / tried[today], hour.arrivals, (today, best), timed, stage)
    proposed = best if expected.is_gain else today
    return Rehearsal(
        wish.objective, hour, today, proposed, tried[today], expected, None, tried,
        wish.evaluator, tuple(_remarks(timed)),
    )  # fmt: skip


def _remarks(timed: Timed) -> list[str]:
    remarks = [
        "drafts are not rehearsed: a log does not say which drafts its answers would have accepted",
        "pools are not rehearsed: `serve --pools auto` takes them from tuned plans, `simulate` compares them",
        "every prompt is computed whole: beginnings that a server would reuse are not",
    ]
    if DEFAULT_PLAN not in timed:
        remarks.insert(
            0, "no plan but the default one is stored: tune-config without --rehearse looks for others"
        )
    return remarks


def _interval(
    gain: float, arrivals: Sequence[Arrival], ways: tuple[ServerWay, ServerWay], timed: Timed, stage: Stage
) -> Interval:
    """The range over steps that are drawn again from those that were timed."""
    gains = [gain]
    for seed in range(RESAMPLES):
        rng = random.Random(seed)
        steps = {name: steps_of(resampled(rows, rng)) for name, rows in timed.items()}
        drawn = replace(stage, steps=steps)
        before, after = (drawn.merit(way, arrivals) for way in ways)
        gains.append(after / before)
    return Interval(gain, min(gains), max(gains))


def _checked(
    rehearsal: Rehearsal,
    plans: dict[str, OpenModel],
    timed: Timed,
    room: ServerRoom,
    deadline_s: float,
    report: Report,
) -> Check | None:
    """None where there is no time for it."""
    window_s = min(MOST_WINDOW_S, WINDOW_SHARE * (deadline_s - time.monotonic()))
    if window_s < LEAST_WINDOW_S:
        report("no time is left to check the proposal: give a larger --budget")
        return None
    stage = Stage({name: steps_of(rows) for name, rows in timed.items()}, room, rehearsal.objective)
    ways = (rehearsal.today, rehearsal.proposed)

    def ends_s(part: Sequence[Arrival]) -> float:
        return max(life.end_s for way in ways for life in stage.lives(way, part))

    part = busiest_part(rehearsal.hour, window_s, ends_s)
    report(f"checking by a run of {counted(len(part), 'request')}, twice {window_s:.0f} s at most ...")
    merits = []
    for way in ways:
        with _engine(plans[way.plans], way, rehearsal.hour) as opened:
            merits.append(merit(rehearsal.objective, replayed(opened, part)))
    predicted = stage.merit(rehearsal.proposed, part) / stage.merit(rehearsal.today, part)
    return Check(len(part), window_s, predicted, merits[1] / merits[0])
