"""Schedules that win in a server's idle time: used between two steps, by ranks from the next start on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")

from phasewise.kerneldb import shipped
from phasewise.serving.engine.engine_host import OWN_CORES, EngineHost
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Delivery, Evidence, Failure, Submit
from phasewise.serving.engine.open_engine import open_engine
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.opening.open_model import OpenModel, open_model
from phasewise.workflows.serve.idle_tuning import IdleTuning, host_that_tunes
from phasewise.workflows.serve.settings import ServeSettings
from tests.support import idle_winner
from tests.support.models.tiny_models import write_tiny_gguf

ENOUGH_S = 120.0
PROMPT = tuple(range(3, 40))


@contextmanager
def serving(opened: OpenModel, model: Path, db: str, said: list[str]) -> Iterator[Served]:
    """An engine that tunes in idle time, as `serve --tune-idle` opens it, without HTTP."""
    size = EngineSize.for_many(opened.model, 4, None, None)
    with open_engine(opened.model, opened.plans, size, schedules=opened.schedules) as alone:
        host = host_that_tunes(alone.engine, str(model), opened, ServeSettings(db=db), said.append)
        answers: SimpleQueue[Answer | Failure] = SimpleQueue()

        def deliver(delivery: Delivery) -> None:
            for out in delivery.outs:
                answers.put(out)

        running = host(deliver, lambda: None, OWN_CORES)
        running.start()
        try:
            yield Served(running, answers)
        finally:
            running.stop()


class Served:
    """Answers one request after another."""

    def __init__(self, host: EngineHost, answers: SimpleQueue[Answer | Failure]) -> None:
        self._host = host
        self._answers = answers

    def evidence(self) -> Evidence:
        """Tokens and digests of logits of one answer."""
        self._host.send(Submit("0", PROMPT, 12, GREEDY, ignore_eos=True, receipt=True))
        while True:
            answer = self._answers.get(timeout=ENOUGH_S)
            assert isinstance(answer, Answer)
            if answer.finish_reason is not None:
                assert answer.evidence is not None
                return answer.evidence


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_winners_of_idle_time_are_used_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    if len(os.sched_getaffinity(0)) < ranks:
        pytest.skip("two ranks need two cores")
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "shipped_names", lambda: ())
    monkeypatch.setattr("phasewise.workflows.tune_kernels.idle_process.MODULE", idle_winner.MODULE)
    monkeypatch.setattr(IdleTuning, "after_s", 0.05)
    model, db = write_tiny_gguf(tmp_path / "tiny.gguf"), str(tmp_path / "here.db")

    def opened() -> OpenModel:
        return open_model(str(model), threads=ranks, ranks=ranks, db=db)

    said, first = list[str](), opened()
    with serving(first, model, db, said) as served:
        before = served.evidence()
        deadline_s = time.monotonic() + ENOUGH_S
        while not said:
            assert time.monotonic() < deadline_s, "the process told of no winner"
            time.sleep(0.02)
        after = served.evidence()
    again = opened()
    with serving(again, model, db, []) as served:
        later = served.evidence()

    assert "run by new schedules" in said[0]
    assert said[0].endswith("from the next start on") == (ranks > 1)
    assert again.explain(8, 1) != first.explain(8, 1), "the next start runs by the winners"
    assert before == after == later
