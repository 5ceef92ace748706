"""A promise that cannot be kept is told by servers, whose option it is, and by no command of one answer."""

from __future__ import annotations

import threading

import pytest

from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Answer, Delivery, Submit
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.pacing import Pacing
from tests.support.servers.fake_engine import FakeRanks, make_engine, next_letter

REQUEST = Submit("r", (97,), 8, GREEDY)


def slow_engine() -> Engine:
    """Each of its steps takes longer than it promises."""
    engine = make_engine(FakeRanks(next_letter))
    engine.pacing = Pacing(1, 64)
    return engine


def test_a_server_tells_once_that_it_cannot_keep_its_promise(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    def deliver(delivery: Delivery) -> None:
        if any(isinstance(out, Answer) and out.finish_reason for out in delivery.outs):
            over.set()

    thread = EngineThread(slow_engine(), deliver)
    thread.start()
    thread.send(REQUEST)
    assert over.wait(60)
    assert thread.stop()

    assert [record.getMessage().count("--tpot promises") for record in caplog.records] == [1]


def test_an_engine_without_a_server_says_nothing_of_a_server_s_options(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = slow_engine()
    engine.submit(REQUEST)
    while engine.has_work:
        engine.step()

    assert engine.load().steps_over_tpot > 0
    assert caplog.records == []
