"""Work that gives way to requests: in an engine's idle time, beside it, and on threads of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Answer, Delivery, Submit
from phasewise.serving.processes.behind_others import NICENESS, behind_others, keep_to
from phasewise.serving.sampling.sampling import GREEDY
from tests.support.servers.fake_engine import encode, make_engine

BOUND_S = 60.0


class _Idle:
    """Writes down what it is told, with the engine's work at that time."""

    after_s = 0.02

    def __init__(self) -> None:
        self.engine = make_engine()
        self.told: list[str] = []
        self.had_work: list[bool] = []

    def go_on(self) -> None:
        self.told.append("on")
        self.had_work.append(self.engine.has_work)

    def pause(self) -> None:
        self.told.append("off")
        self.had_work.append(self.engine.has_work)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_idle_work_runs_between_requests_and_never_beside_them() -> None:
    idle, done = _Idle(), threading.Event()

    def deliver(delivery: Delivery) -> None:
        if any(isinstance(out, Answer) and out.finish_reason for out in delivery.outs):
            done.set()

    thread = EngineThread(idle.engine, deliver, idle=idle)
    thread.start()
    for number in range(3):
        wait_for(lambda number=number: idle.told.count("on") > number)  # type: ignore[misc]
        done.clear()
        thread.send(Submit(str(number), tuple(encode("a")), 5, sampling=GREEDY))
        assert done.wait(BOUND_S)
    assert thread.stop()

    assert idle.told == ["on", "off"] * (len(idle.told) // 2)
    assert len(idle.told) >= 6
    assert not any(idle.had_work)


def test_what_is_done_between_steps_is_done_on_the_engines_thread() -> None:
    idle, names, done = _Idle(), list[str](), threading.Event()
    thread = EngineThread(idle.engine, lambda _: None, idle=idle)
    thread.start()
    wait_for(lambda: "on" in idle.told)

    def act() -> None:
        names.append(threading.current_thread().name)
        done.set()

    thread.between_steps(act)
    assert done.wait(BOUND_S)
    assert idle.told[:2] == ["on", "off"]
    assert thread.stop()
    assert names == ["phasewise-engine"]


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
