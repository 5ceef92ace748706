"""Plans for loads: a run of `tune-config` for one number of decoding sequences after another.

The first run finds whole plans. Each later run searches decode for more sequences at once, among cores on the
nodes of the first run's ranks; a faster configuration becomes a band of the plan (decision 0149).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from phasewise._words import counted, number
from phasewise.tuner.config.walk import machine_beside
from phasewise.workflows.tune_config.run import End, tune

if TYPE_CHECKING:
    from phasewise.tuner.measurement_lock import MeasurementLock
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_config.settings import Show, TuneConfigSettings
    from phasewise.workflows.tune_config.subject import Subject

WORST_FIRST: tuple[End, ...] = ("interrupted", "budget")


def tune_loads(
    wish: TuneConfigSettings, subject: Subject, started_s: float, show: Show, lock: MeasurementLock
) -> Found:
    """Run `run.tune` for the wish's objective, then for each of its bands, within one budget.

    Each phase and each band may take an equal part, and the time that earlier ones left.
    """
    if not wish.bands:
        return tune(wish, subject, started_s, show, lock)
    share = len(wish.phases) / (len(wish.phases) + len(wish.bands))
    first = tune(replace(wish, budget_s=share * wish.budget_s), subject, started_s, show, lock)
    runs, last = [first], first
    for place, sequences in enumerate(wish.bands):
        left_s = started_s + wish.budget_s - time.monotonic()
        below = last.decode_plan
        if last.end == "interrupted" or below is None:
            break
        if left_s <= 0:
            last = replace(last, end="budget")
            break
        show.say(
            f"decode of {sequences} sequences at once, in {counted(len(below.ranks), 'rank')},"
            f" for at most {number(left_s / (len(wish.bands) - place), 0)} s"
        )
        own = replace(
            wish, phase="decode", concurrency=(sequences,), budget_s=left_s / (len(wish.bands) - place)
        )
        beside = replace(
            subject,
            objective=own.goal,
            machine=machine_beside(subject.machine, below),
            below=below,
            objectives_below=last.objectives,
        )
        last = tune(own, beside, time.monotonic(), show, lock)
        runs.append(last)
    ends: set[End] = {run.end for run in (*runs, last)}
    return replace(
        first,
        wish=wish,
        bands=tuple(runs[1:]),
        end=next((end for end in WORST_FIRST if end in ends), "complete"),
        elapsed_s=time.monotonic() - started_s,
    )
