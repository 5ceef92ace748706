"""Work that gives way: on a thread of its own, which leaves the process as it was."""

from __future__ import annotations

import os
import threading

import pytest

from phasewise.serving.processes.behind_others import NICENESS, behind_others, keep_to

Place = tuple[int, int, frozenset[int]]
"""A thread, its niceness and its cores."""


def place() -> Place:
    thread = threading.get_native_id()
    return thread, os.getpriority(os.PRIO_PROCESS, thread), frozenset(os.sched_getaffinity(0))


def place_of_another() -> Place:
    """Of a thread that this one starts."""
    places: list[Place] = []
    other = threading.Thread(target=lambda: places.append(place()))
    other.start()
    other.join()
    return places[0]


def test_work_gives_way_and_the_process_is_as_before() -> None:
    before, n_threads = place(), threading.active_count()
    own = max(before[2])
    with behind_others([own]) as run:
        thread, niceness, cores = run(place)
        assert run(place) == (thread, niceness, cores)
        started = run(place_of_another)
        assert place() == before

    assert (niceness, cores) == (min(19, before[1] + NICENESS), {own})
    assert thread != before[0]
    assert started[1:] == (niceness, cores)
    assert (place(), threading.active_count()) == (before, n_threads)


def test_a_thread_without_cores_of_its_own_may_run_where_its_process_may() -> None:
    own = min(os.sched_getaffinity(0))
    with behind_others() as run:
        assert run(place)[2] == place()[2]
        run(keep_to, [own])
        assert run(place)[2] == {own}


def test_cores_that_are_not_there_change_nothing() -> None:
    with behind_others([1 << 14]) as run:
        assert run(place)[2] == place()[2]


def test_what_is_raised_there_is_raised_here() -> None:
    with behind_others() as run, pytest.raises(ValueError, match="no such model"):
        run(_raise, ValueError("no such model"))


def _raise(error: Exception) -> None:
    raise error
