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
from statistics import median
from typing import TYPE_CHECKING

from phasewise._words import counted, multiple
from phasewise.serving.pools.opening import DEFAULT_POLICY, POLICIES
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.scheduler_terms import DEFAULT_BATCH_TOKENS
from phasewise.tuner.errors import TraceError
from phasewise.workflows.config_file import StandingOptions
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.rehearse.check import Check, checked
from phasewise.workflows.rehearse.engines import Engines
from phasewise.workflows.rehearse.hour import Hour, read_hour
from phasewise.workflows.rehearse.timed import Timed, timed_halves
from phasewise.workflows.rehearse.timed_steps import timed_steps
from phasewise.workflows.rehearse.ways import (
    DEFAULT_PLAN,
    IN_USE,
    DraftTokens,
    ServerRoom,
    ServerWay,
    Stage,
    best_way,
)
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from pathlib import Path

    from phasewise.cluster.simulated.recorded_steps import TimedStep
    from phasewise.cluster.simulated.simulated_requests import Arrival
    from phasewise.tuner.config.simulate import Objective
    from phasewise.tuner.measurement_lock import MeasurementLock
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.tune_config.subject import Wish

RESAMPLES = 6
FINALISTS = 3
"""Ways whose gains are simulated by other samples of the steps: the best of many tries only looks best."""

TIMED_SHARE, HALVES_SHARE, SIMULATED_SHARE = 0.2, 0.3, 0.5
"""Shares of the budget, by when steps are timed, by when those of halves are, and by when the proposal has to
be there."""

FIRST_CHECK_SHARE, SIMULATED_AGAIN_SHARE = 0.5, 0.1
"""Pools share caches and memory with their front, as steps do not tell: their check leaves time for another
proposal. Of the time that is left, and of the budget."""


@dataclass(frozen=True)
class Interval:
    """A gain over today's settings, with the ends of what other timings of the steps may have given."""

    gain: float
    low: float
    high: float


NO_GAIN = Interval(1.0, 1.0, 1.0)


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
    """The hour of `log`, by the step times of the wish's evaluator.

    TraceError, UsageError, WorkflowError, ClusterError, ModelError.
    """
    hour = read_hour(log, report)
    today = todays_way(hour)
    if wish.objective.kind == "tpot" and all(arrival.output_tokens == 1 for arrival in hour.arrivals):
        raise TraceError(f"{log} has no answer of two tokens, and --objective tpot counts later tokens alone")

    def is_over(share: float = SIMULATED_SHARE) -> bool:
        return time.monotonic() > started_s + share * wish.budget_s

    if wish.evaluator != "measured":
        from phasewise.workflows.rehearse.other_steps import calculated_steps

        steps, room = calculated_steps(wish, hour, report)
        timed = Timed(steps)
        remarks = (
            *_remarks(hour, timed),
            "pools are not rehearsed: steps of halves are timed on this machine",
        )
        return _proposed(hour, today, timed, room, wish, is_over, remarks, report)
    from phasewise.workflows.opening.open_model import Weights, open_model

    opened_model = open_model(wish.model, Weights(wish.weight_format), db=wish.db, report=report)
    hour = hour.fitted(opened_model.model.config.context_length)
    engines = Engines(_plans_of(opened_model), wish)
    with lock.turn(wish.budget_s):
        report("timing the model's steps ...")
        timed, room, remarks = _measured(engines, hour, today, is_over, report)

        def proposed(pools: bool, remarks: Sequence[str], simulated_s: float) -> Rehearsal:
            used = timed if pools else replace(timed, halves={})
            return _proposed(
                hour, today, used, room, wish, lambda: time.monotonic() > simulated_s, remarks, report
            )

        def with_check(rehearsal: Rehearsal, share: float) -> Rehearsal:
            left_s = started_s + wish.budget_s - time.monotonic()
            ways = (today, rehearsal.proposed)
            stage = timed.stage(room, wish.objective)
            check = checked(ways, hour, stage, engines, time.monotonic() + share * left_s, report)
            return replace(rehearsal, check=check)

        first = proposed(True, remarks, started_s + SIMULATED_SHARE * wish.budget_s)
        return surviving(
            first,
            with_check,
            lambda told: proposed(False, told, time.monotonic() + SIMULATED_AGAIN_SHARE * wish.budget_s),
        )


def surviving(
    rehearsal: Rehearsal,
    with_check: Callable[[Rehearsal, float], Rehearsal],
    without_pools: Callable[[Sequence[str]], Rehearsal],
) -> Rehearsal:
    """The rehearsal after its check; another one without pools, where the check refutes pools.

    with_check: runs the proposal in a share of the time that is left. without_pools: a rehearsal with these
    remarks.
    """
    if rehearsal.proposed == rehearsal.today:
        return rehearsal
    if rehearsal.proposed.pools is None:
        return with_check(rehearsal, 1.0)
    rehearsal = with_check(rehearsal, FIRST_CHECK_SHARE)
    if rehearsal.check is None or rehearsal.check.reaches_predicted:
        return rehearsal
    again = without_pools((*rehearsal.remarks, _refuted(rehearsal, rehearsal.check)))
    return again if again.proposed == again.today else with_check(again, 1.0)


def _refuted(rehearsal: Rehearsal, check: Check) -> str:
    changes = " ".join(rehearsal.proposed.options(rehearsal.today))
    return (
        f"a run of {changes} gave {multiple(check.measured, 3)} of today's, not the "
        f"{multiple(check.predicted, 3)} that were simulated: it is not proposed"
    )


def todays_way(hour: Hour) -> ServerWay:
    """The settings of `serve`, as variables and the configuration file say.

    UsageError for wrong ones, and for those whose hour cannot be run again.
    """
    options = StandingOptions.of("serve")
    text = options.text("tpot")
    try:
        tpot_ms = DEFAULT_TPOT_MS if text is None else float(text)
    except ValueError:
        raise UsageError(f"tpot is {text!r:.40}, not a number of milliseconds") from None
    if divided := [key for key in _DIVIDED if options.text(key) not in (None, "off")]:
        raise UsageError(f"{divided[0]} divides today's server: a rehearsal begins from one engine; unset it")
    return ServerWay(
        kv_policy=options.text("kv_policy", tuple(POLICIES)) or DEFAULT_POLICY,
        tpot_ms=tpot_ms,
        batch_tokens=options.count("max_batch_tokens") or DEFAULT_BATCH_TOKENS,
        draft_tokens=_todays_drafts(options, hour),
    )


_DIVIDED = ("prompt_pool", "token_pool", "mixed_pool", "pools", "cluster")


def _todays_drafts(options: StandingOptions, hour: Hour) -> DraftTokens:
    from phasewise.workflows.opening.drafts import LOOKUP, NOT_NAMED, OFF

    source = options.text("draft")
    if source in (*NOT_NAMED, OFF):
        return None
    if source != LOOKUP:
        raise UsageError(f"draft is {source!r:.40}: only the drafts of {LOOKUP} can be rehearsed; unset it")
    if not hour.tells_drafts:
        raise UsageError(
            "draft is set, but the log does not say which drafts its answers accepted: an older release "
            "wrote it, or no server; log anew with --length-log, or unset draft"
        )
    return "auto" if options.text("draft_tokens") in (None, "auto") else options.count("draft_tokens")


def _plans_of(opened_model: OpenModel) -> dict[str, OpenModel]:
    """The plans in use, and beside stored ones the default plans."""
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan

    machine = read_machine()
    defaults = {phase: default_plan(machine, phase) for phase in opened_model.plans}
    plans = opened_model.plans.items()
    if all(plan.ranks == defaults[phase].ranks and not plan.bands for phase, plan in plans):
        return {IN_USE: opened_model}
    return {IN_USE: opened_model, DEFAULT_PLAN: replace(opened_model, plans=defaults)}


def _measured(
    engines: Engines, hour: Hour, today: ServerWay, is_over: Callable[[float], bool], report: Report
) -> tuple[Timed, ServerRoom, tuple[str, ...]]:
    """Step times of this machine, the room of its engine, and what could not be timed."""
    by_plans: dict[str, list[TimedStep]] = {}
    room = ServerRoom(0)
    for name in engines.models:
        with engines.engine(replace(today, plans=name)) as opened:
            share = TIMED_SHARE * (len(by_plans) + 1) / len(engines.models)
            by_plans[name] = timed_steps(opened, is_over=partial(is_over, share))
            limits = opened.size.limits
            room = ServerRoom(opened.size.kv.slots, limits.max_sequences, limits.context_length)
    timed = Timed(by_plans)
    remarks = _remarks(hour, timed)
    report("timing two pools of half the cores each ...")
    try:
        timed = replace(timed, halves=timed_halves(engines, today, partial(is_over, HALVES_SHARE)))
    except WorkflowError as error:
        remarks = (*remarks, f"pools are not rehearsed: {error}")
    return timed, room, remarks


def _proposed(
    hour: Hour,
    today: ServerWay,
    timed: Timed,
    room: ServerRoom,
    wish: Wish,
    is_over: Callable[[], bool],
    remarks: Sequence[str],
    report: Report,
) -> Rehearsal:
    report(f"simulating {counted(len(hour.arrivals), 'request')} ...")
    stage = timed.stage(room, wish.objective)
    best, tried = best_way(stage, today, hour.arrivals, is_over)
    proposed, expected = today, NO_GAIN
    if best != today:
        others = sorted((way for way in tried if way != best), key=lambda way: -tried[way])
        stages = [timed.stage(room, wish.objective, random.Random(seed)) for seed in range(RESAMPLES)]
        proposed, expected = surest(stages, today, [best, *others], tried, hour.arrivals, is_over)
    return Rehearsal(
        wish.objective, hour, today, proposed, tried[today], expected, None, tried,
        wish.evaluator, tuple(remarks),
    )  # fmt: skip


def surest(
    stages: Sequence[Stage],
    today: ServerWay,
    ways: Sequence[ServerWay],
    tried: dict[ServerWay, float],
    arrivals: Sequence[Arrival],
    is_over: Callable[[], bool],
) -> tuple[ServerWay, Interval]:
    """Choose, among the first few ways, the one whose least gain in any of `stages` is largest; today's where
    none gains.

    is_over: asked before each but the first.
    """
    before = [stage.merit(today, arrivals) for stage in stages]
    chosen, surely = today, NO_GAIN
    for place, way in enumerate(ways[:FINALISTS]):
        if way == today or (place and is_over()):
            break
        after = [stage.merit(way, arrivals) for stage in stages]
        gains = [tried[way] / tried[today], *(a / b for a, b in zip(after, before, strict=True))]
        interval = Interval(median(gains), min(gains), max(gains))
        if interval.low > surely.low:
            chosen, surely = way, interval
    return chosen, surely


def _remarks(hour: Hour, timed: Timed) -> tuple[str, ...]:
    remarks = ["every prompt is computed whole: beginnings that a server would reuse are not"]
    if not hour.tells_drafts:
        remarks.insert(
            0,
            "drafts are not rehearsed: the log does not say which its answers would have accepted, as "
            "this release's --length-log does",
        )
    if DEFAULT_PLAN not in timed.by_plans:
        remarks.insert(
            0, "no plan but the default one is stored: tune-config without --rehearse looks for others"
        )
    return tuple(remarks)
