"""Python's share of a decode step.

Run as `python benchmarks/python_share.py [MODEL] [-n 128] [-b 1] [--format native] [--http]`. A step is what
lies between two results of `forward`. Counted is everything in it that is neither the native forward pass nor
the native argmax over its logits: choosing the batch, describing it, sampling (greedy), detokenising, making
the message; and with --http, where the sequences are streams to as many clients in another process, taking
messages, handing deliveries to the event loop and waiting for Python's lock while it writes. The median step
is printed, of those that had all sequences in them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import raw_http

from phasewise.cli.opening import open_model
from phasewise.cli.options import WeightFormat
from phasewise.serving import sampling
from phasewise.serving.batch import Batch
from phasewise.serving.http.listening import TcpAddress
from phasewise.serving.http.served import HttpLimits
from phasewise.serving.messages import Submit
from phasewise.serving.ranks import LocalRanks
from phasewise.serving.service import ServiceSettings, run_service
from phasewise.serving.start import EngineSize, OpenEngine, open_engine

PROMPT = "The history of the steam engine begins"


@dataclass
class Steps:
    """Watches ranks: when each decode step of `n_sequences` ended, and what was native until then."""

    ranks: LocalRanks
    n_sequences: int
    argmax_ns: int = 0
    ends: list[tuple[int, int] | None] = field(default_factory=list)
    """(time, native time) on running clocks; None: a step of another kind."""

    def __post_init__(self) -> None:
        self._forward, self.ranks.forward = self.ranks.forward, self.forward
        self._argmax, sampling.argmax = sampling.argmax, self.argmax

    def forward(self, batch: Batch) -> np.ndarray:
        logits = self._forward(batch)
        counts = batch.phase == "decode" and len(batch.slices) == self.n_sequences
        native_ns = self.ranks.native_ns + self.argmax_ns
        self.ends.append((time.perf_counter_ns(), native_ns) if counts else None)
        return logits

    def argmax(self, row: np.ndarray) -> int:
        started_ns = time.perf_counter_ns()
        index: int = self._argmax(row)
        self.argmax_ns += time.perf_counter_ns() - started_ns
        return index

    def say(self) -> str:
        pairs = zip(self.ends, self.ends[1:], strict=False)
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairs if a is not None and b is not None]
        step_us = statistics.median(step for step, _ in steps) / 1e3
        python_us = statistics.median(step - native for step, native in steps) / 1e3
        share = f"{python_us / step_us:.1%}"
        return f"{len(steps)} decode steps of {step_us:.0f} us, Python {python_us:.0f} us: {share}"


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
    command = [
        sys.executable,
        __file__,
        "model",
        "-n",
        str(n_gen),
        "-b",
        str(n_sequences),
        "--clients-of",
        port,
    ]
    with address:
        clients = subprocess.Popen(command)
        run_service(opened, ServiceSettings(("model",), HttpLimits()), address, lambda _line: None)
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Python's share of a decode step")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-b", type=int, default=1)
    parser.add_argument("--format", default="native")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--clients-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients_of is not None:
        try:
            asyncio.run(be_clients(arguments.clients_of, arguments.n, arguments.b))
        finally:
            os.kill(os.getppid(), signal.SIGTERM)
        return
    found = open_model(arguments.model, WeightFormat(arguments.format), None, None)
    size = EngineSize.for_many(found.model, arguments.b, arguments.n + 64, None)
    with open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
        steps = Steps(cast(LocalRanks, opened.engine.ranks), arguments.b)
        (serve if arguments.http else run)(opened, arguments.n, arguments.b)
        print(steps.say())


if __name__ == "__main__":
    main()
