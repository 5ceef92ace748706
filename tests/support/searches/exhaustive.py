"""Every schedule of a space: the oracle that the searches are held against, for spaces small enough."""

from __future__ import annotations

import itertools

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.protocol import Search, fastest
from phasewise.tuner.search.space import ScheduleSpace

BATCH = 64


def exhaustive(space: ScheduleSpace, batch: int = BATCH) -> Search[Schedule]:
    """Time all of `space.schedules()`, a batch at a time."""
    best: list[Sample] = []
    schedules = space.schedules()
    while asked := list(itertools.islice(schedules, batch)):
        samples = yield asked
        best = [fastest([*best, *samples])]
    return best[0].schedule
