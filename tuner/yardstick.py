"""Reference workload: a fixed piece of work, timed beside schedules, that tells when the host is slower than
it can be.

A neighbour on a core's other hyper-thread takes half of what the core does, for seconds or minutes, and no
steal time tells of it: timings of one product lie at half their limit between others that reach it. The
yardstick feels it too. What was timed meanwhile is timed again, and marked if the host stays slow.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from phasewise.cython_kernels import limit_loops
from phasewise.tuner.conditions import SLOW_PACE

RETRIES = 2
PAUSE_S = 0.2
"""Seconds of pause before something is timed again: a neighbour's burst may be over by then."""

LOOP_NS = 200_000
READINGS = 5
"""Readings of the clock loop, of which the best counts: a timer tick, or a team that still spins, lengthens
one."""

T = TypeVar("T")
Work = Callable[[], Sequence[float]]
"""Runs the fixed piece of work on every core at once; nanoseconds of each."""


class Yardstick:
    """The speed of every core now, as a share of the fastest that it was seen."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._best_ns: list[float] = []

    def pace(self) -> float:
        """Pace of the slowest core, 0 to 1."""
        now_ns = list(self._work())
        best_ns = self._best_ns or [math.inf] * len(now_ns)
        self._best_ns = [min(pair) for pair in zip(best_ns, now_ns, strict=True)]
        return min(best / now for best, now in zip(self._best_ns, now_ns, strict=True))


def steadily(take: Callable[[], T], yardstick: Yardstick, pause_s: float = PAUSE_S) -> tuple[T, float]:
    """The result of `take` while the host is not slow, or after RETRIES more attempts; and the pace then."""
    before = yardstick.pace()
    attempts_left = RETRIES
    while True:
        reading = take()
        pace = min(before, yardstick.pace())
        if pace >= SLOW_PACE or not attempts_left:
            return reading, pace
        attempts_left -= 1
        time.sleep(pause_s)
        before = yardstick.pace()


class CoreLoops:
    """The work of a real yardstick: float32 multiply-adds for LOOP_NS, on each of `cores` at once."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._pools = [
            ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {core})) for core in cores
        ]
        calibration = 1 << 14
        spent_ns = self._pools[0].submit(_loop_ns, calibration).result()
        self._rounds = max(1, round(calibration * LOOP_NS / spent_ns))

    def __call__(self) -> list[float]:
        readings = [pool.submit(_loop_ns, self._rounds) for pool in self._pools]
        return [reading.result() for reading in readings]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()


def _loop_ns(rounds: int) -> float:
    """Time of the fastest of READINGS loops."""
    spans = []
    for _ in range(READINGS):
        started_ns = time.perf_counter_ns()
        limit_loops.peak("f32", rounds)
        spans.append(time.perf_counter_ns() - started_ns)
    return float(min(spans))
