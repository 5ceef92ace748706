"""`run_service` in this process, over a tiny model: what it holds while it serves, and gives back then."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from phasewise.serving.engine.engine_size import EngineSize
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf
from tests.support.servers.rude_clients import until

start = pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.serving.engine.engine_thread import EngineThread  # noqa: E402
from phasewise.serving.engine.messages import Submit  # noqa: E402
from phasewise.serving.http.http_settings import HttpLimits  # noqa: E402
from phasewise.serving.http.transport.listening import TcpAddress  # noqa: E402
from phasewise.serving.loaders import load_model  # noqa: E402
from phasewise.serving.model_table import ModelTable, Predictor, TextRow  # noqa: E402
from phasewise.serving.pools.contract import Estimate  # noqa: E402
from phasewise.serving.service import ServiceSettings, run_service  # noqa: E402
from phasewise.topology import read_machine  # noqa: E402
from phasewise.tuner.plans import default_plan  # noqa: E402

N_ANSWERS = 3


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[start.OpenEngine]:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", shape=TinyShape(context_length=512))
    model = load_model(str(path), "native", tmp_path / "cache")
    machine = read_machine()
    plans = {phase: default_plan(machine, phase) for phase in ("prefill", "decode")}
    size = EngineSize.for_many(model, 4, None, 64 << 20)
    with start.open_engine(model, plans, size) as engine:
        yield engine


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A server leaves signals ignored: it is the end of its process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def serve(opened: start.OpenEngine, predictor: Predictor, work: Callable[[str], None]) -> None:
    """Until `work`, which is given the URL, has ended."""

    def client() -> None:
        try:
            work(address.url)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with TcpAddress("127.0.0.1", 0) as address:
        worker = threading.Thread(target=client)

        def report(line: str) -> None:
            if line.startswith("listening"):
                worker.start()

        host = partial(EngineThread, opened.engine)
        row = TextRow(opened.model, opened.text, opened.size, ("tiny",), host, predictor=predictor)
        run_service(ModelTable([row]), ServiceSettings(HttpLimits()), address, report)
        worker.join()


@pytest.mark.usefixtures("own_signals")
def test_what_the_start_made_is_not_collected_while_it_serves_and_its_threads_end_with_it(
    opened: start.OpenEngine,
) -> None:
    gc.unfreeze()  # what tests are made of
    learned: list[int] = []
    frozen: list[int] = []

    def estimate(asked: Submit) -> Estimate:
        return Estimate(len(asked.prompt_token_ids), 0.0)

    def learn(_asked: Submit, output_tokens: int) -> None:
        learned.append(output_tokens)

    def work(url: str) -> None:
        for n_tokens in range(1, N_ANSWERS + 1):
            body = {"model": "tiny", "prompt": "a", "max_tokens": n_tokens, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        frozen.append(gc.get_freeze_count())
        until(lambda: len(learned) == N_ANSWERS, "the predictor does not learn them")

    serve(opened, Predictor(estimate, learn), work)

    assert learned == [1, 2, 3]
    assert frozen[0] > len(gc.get_objects()) // 2
    assert gc.get_freeze_count() == 0
    gc.freeze()
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("phasewise-predictor", "phasewise-engine"))}
