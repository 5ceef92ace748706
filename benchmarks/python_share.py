"""Python's share of a decode step.

Run as `python benchmarks/python_share.py [MODEL] [-n 128] [-b 1] [--format native] [--http]`. A step is what
lies between two results of `forward`; the median of those that had all sequences in them is printed. Python
is everything in it that is neither the native forward pass nor the native argmax over its logits: choosing
the batch, describing it, sampling (greedy), detokenising, making the message.

With --http the same follows once more, the sequences being streams to as many clients in another process.
Then Python is also taking messages, handing deliveries to the event loop and waiting for Python's lock; what
the event loop's thread computes for a step is printed beside it, since it takes that from the step's cores.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Annotated, NamedTuple, cast

import numpy as np
from typer import Option

from benchmarks.harness import MODEL, Model, Yielded, commands
from phasewise.serving.batch import Batch
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.listening import TcpAddress
from phasewise.serving.model_table import ModelTable, TextRow
from phasewise.serving.ranks.open_ranks import LocalRanks
from phasewise.serving.sampling import sampling
from phasewise.serving.service import ServiceSettings, run_service
from phasewise.workflows.opening.open_model import open_model
from phasewise.workflows.opening.settings import Weights
from tests.soak import raw_http

PROMPT = "The history of the steam engine begins"


class End(NamedTuple):
    """Running clocks at the end of a step that had all sequences in it."""

    at_ns: int
    native_ns: int
    main_cpu_ns: int
    """Computed by the main thread: the event loop's, where there is one."""


class Steps:
    """Watches decode steps of `n_sequences` while `with` lasts."""

    def __init__(self, ranks: LocalRanks, n_sequences: int) -> None:
        self._ranks = ranks
        self._n_sequences = n_sequences
        self._argmax_ns = 0
        self._ends: list[End | None] = []  # None: of a step of another kind
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    def __enter__(self) -> Steps:
        self._forward, self._ranks.forward = self._ranks.forward, self._timed_forward
        self._argmax, sampling.argmax = sampling.argmax, self._timed_argmax
        return self

    def __exit__(self, *_error: object) -> None:
        self._ranks.forward, sampling.argmax = self._forward, self._argmax

    def medians_us(self) -> tuple[float, float, float]:
        """(whole step, its Python, computed by the main thread meanwhile)."""
        pairs = zip(self._ends, self._ends[1:], strict=False)
        steps = [(np.array(later) - earlier) / 1e3 for earlier, later in pairs if earlier and later]
        whole, native, main = np.array(steps).T
        return float(np.median(whole)), float(np.median(whole - native)), float(main.mean())

    def _timed_forward(self, batch: Batch) -> np.ndarray:
        logits = self._forward(batch)
        counts = batch.phase == "decode" and len(batch.slices) == self._n_sequences
        native_ns = self._ranks.native_ns + self._argmax_ns
        cpu_ns = time.clock_gettime_ns(self._clock)
        self._ends.append(End(time.perf_counter_ns(), native_ns, cpu_ns) if counts else None)
        return logits

    def _timed_argmax(self, row: np.ndarray) -> int:
        started_ns = time.perf_counter_ns()
        index: int = self._argmax(row)
        self._argmax_ns += time.perf_counter_ns() - started_ns
        return index


def run(opened: OpenEngine, n_gen: int, n_sequences: int) -> None:
    """Without HTTP."""
    ids = tuple(opened.text.encode(PROMPT, True))
    for index in range(n_sequences):
        greedy = sampling.SamplingParams(temperature=0.0)
        opened.engine.submit(Submit(str(index), ids, sampling=greedy, max_tokens=n_gen, ignore_eos=True))
    while opened.engine.has_work:
        opened.engine.step()


def serve(opened: OpenEngine, n_gen: int, n_sequences: int) -> None:
    """With HTTP: this script once more, as the clients. They end the server when they are done."""
    address = TcpAddress("127.0.0.1", 0)
    port = address.url.rpartition(":")[2]
    command = [sys.executable, __file__, "model", "-n", str(n_gen), "-b", str(n_sequences)]
    command += ["--clients-of", port]
    with address:
        clients = subprocess.Popen(command)
        host = partial(EngineThread, opened.engine)
        table = ModelTable([TextRow(opened.model, opened.text, opened.size, ("model",), host)])
        run_service(table, ServiceSettings(HttpLimits()), address, lambda _line: None)
        clients.wait()


async def be_clients(port: int, n_gen: int, n_sequences: int) -> None:
    while not await is_there(port):
        await asyncio.sleep(0.05)
    body = {"model": "model", "prompt": PROMPT, "max_tokens": n_gen, "temperature": 0, "ignore_eos": True}
    streams = [raw_http.stream(port, "/v1/completions", body | {"stream": True}) for _ in range(n_sequences)]
    await asyncio.gather(*streams)


async def is_there(port: int) -> bool:
    try:
        return (await raw_http.ask(port, "GET", "/health")).status == 200
    except OSError:
        return False


def python_share(
    model: Model = MODEL,
    n: Annotated[int, Option("-n", help="tokens of each sequence")] = 128,
    b: Annotated[int, Option("-b", help="sequences")] = 1,
    weights: Annotated[str, Option("--format")] = "native",
    http: Annotated[bool, Option("--http")] = False,
    clients_of: Annotated[int | None, Option(hidden=True)] = None,
) -> Yielded:
    if clients_of is not None:
        try:
            asyncio.run(be_clients(clients_of, n, b))
        finally:
            os.kill(os.getppid(), signal.SIGTERM)
        return
    loaded = open_model(model, Weights(weights))
    size = EngineSize.for_many(loaded.model, b, n + 64, None)
    with open_engine(loaded.model, loaded.plans, size, schedules=loaded.schedules) as opened:
        ranks = cast(LocalRanks, opened.engine.ranks)
        with Steps(ranks, b) as steps:
            run(opened, n, b)
        alone_us, python_us, _ = steps.medians_us()
        yield f"decode step {alone_us:.0f} us, Python {python_us:.0f} us: {python_us / alone_us:.1%}"
        if http:
            native_us = alone_us - python_us
            with Steps(ranks, b) as steps:
                serve(opened, n, b)
            step_us, python_us, loop_us = steps.medians_us()
            yield (
                f"with HTTP {step_us:.0f} us, Python {python_us:.0f} us: {python_us / step_us:.1%}; the "
                f"event loop's thread {loop_us:.0f} us a step; beside the {native_us:.0f} us that were "
                f"native without HTTP, all else is {1 - native_us / step_us:.1%}"
            )


app = commands(__doc__, python_share)

if __name__ == "__main__":
    app()
