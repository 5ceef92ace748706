"""The yardstick: slow states of the host are recognised, timed again, and marked if they last."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest

from phasewise.tuner.conditions import Conditions, is_disturbed
from phasewise.tuner.native import RETRIES, CoreLoops, Yardstick, steadily


def read(*spans_ns: Sequence[float]) -> Yardstick:
    """A yardstick that reads these, one after the other, and the last for ever."""
    readings: Iterator[Sequence[float]] = itertools.chain(spans_ns, itertools.repeat(spans_ns[-1]))
    return Yardstick(lambda: next(readings))


def test_the_pace_is_that_of_the_slowest_core_beside_its_best() -> None:
    yardstick = read((100, 100), (200, 100), (50, 100), (100, 400))

    assert [yardstick.pace() for _ in range(4)] == [1.0, 0.5, 1.0, 0.25]


def test_a_steady_host_is_timed_once() -> None:
    takes = itertools.count()

    assert steadily(lambda: next(takes), read((100,)), pause_s=0) == (0, 1.0)


@pytest.mark.parametrize("slow", ["before", "after"])
def test_what_was_timed_in_a_slow_state_is_timed_again(slow: str) -> None:
    takes = itertools.count()
    yardstick = read((100,), *([(200,), (100,)] if slow == "before" else [(100,), (200,)]), (100,))
    yardstick.pace()

    assert steadily(lambda: next(takes), yardstick, pause_s=0) == (1, 1.0)


def test_a_host_that_stays_slow_marks_what_was_timed() -> None:
    takes = itertools.count()
    yardstick = read((100,), (200,))
    yardstick.pace()

    last, pace = steadily(lambda: next(takes), yardstick, pause_s=0)

    assert (last, pace) == (RETRIES, 0.5)
    assert is_disturbed(Conditions(0.0, 0.0, None, pace).fields())
    assert not is_disturbed(Conditions(0.0, 0.0, None, 1.0).fields())


def test_real_cores_have_a_pace() -> None:
    loops = CoreLoops(sorted(os.sched_getaffinity(0))[:2])
    try:
        yardstick = Yardstick(loops)
        assert all(0 < yardstick.pace() <= 1 for _ in range(3))
    finally:
        loops.close()
