"""Work in an engine's idle time: only while no request is there, and ended before a message is handled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Answer, Delivery, Submit
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
