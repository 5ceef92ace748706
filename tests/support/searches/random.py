"""Schedules drawn at random: what a search must beat with the same number of measurements."""

from __future__ import annotations

from random import Random

from phasewise.kerneldb.records import Schedule
from phasewise.tuner.search.protocol import Search, fastest
from phasewise.tuner.search.space import ScheduleSpace
from tests.support.searches.exhaustive import every_schedule


def random(space: ScheduleSpace, count: int, seed: int = 0) -> Search[Schedule]:
    """Time `count` different schedules of the space (all of a smaller one), in one batch."""
    schedules = list(every_schedule(space))
    drawn = Random(seed).sample(schedules, min(count, len(schedules)))
    return fastest((yield drawn)).schedule
