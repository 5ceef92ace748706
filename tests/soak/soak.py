"""20,000 requests at the times and with the lengths of a trace (scaled), through HTTP: is every answer right,
does every request end once, does memory stay flat, and is the KV pool empty in the end?

Memory is flat where, after the first quarter of the run, the blocks that Python has given out rise by less
than one for each request, and the bytes of malloc by less than its least block of 32.

Every request belongs to one of a few hundred classes (prompt, seed, number of tokens); what its answer must
be was computed before, alone. Half of the answers are streamed, half of the classes share the beginning of
their prompts, half are sampled with a seed, and a few clients leave. The server checks its scheduler and KV
pool after every step (PHASEWISE_CHECK=1).

    python -m tests.soak.soak --model tiny --trace AzureLLMInferenceTrace_code.csv             # some minutes
    python -m tests.soak.soak --trace AzureLLMInferenceTrace_code.csv --minutes 20 --scale 32 --answer-scale 4
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phasewise.tuner.config.lengths import RequestLengths
from phasewise.tuner.config.trace import load_trace
from tests.soak import raw_http
from tests.soak.served_process import (
    DEFAULT_MODEL,
    TINY,
    ServerProcess,
    leave_no_server,
    model_reference,
    own_cache,
    read_metrics,
)

SHARED_TOKENS = 48
"""Length of the beginnings that half of the classes share."""
TOKEN_IDS = range(3, 259)
"""Ordinary tokens in every vocabulary that this is run with."""
RETRIES = 1000
LEAST_SAMPLES = 20


class Request(NamedTuple):
    """One class of requests: what is sent, less `stream`."""

    prompt: list[int]
    max_tokens: int
    seed: int | None

    def body(self, model: str) -> dict[str, Any]:
        how = {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            **how,
        }


class Expected(NamedTuple):
    text: str
    finish_reason: str
    completion_tokens: int


@dataclass
class Tally:
    """Counts of the requests so far by what came of them, and the server's memory meanwhile."""

    n_right: int = 0
    n_left: int = 0
    """Clients that left, as they were told to."""
    n_refused: int = 0
    """429; each was sent again."""
    wrong: Counter[str] = field(default_factory=Counter)
    blocks: list[tuple[float, float]] = field(default_factory=list)
    """Requests ended, and blocks of memory that the server's Python has given out."""
    malloc_bytes: list[tuple[float, float]] = field(default_factory=list)
    """Requests ended, and bytes that its malloc has; none where the C library does not say."""

    @property
    def n_ended(self) -> int:
        return self.n_right + self.n_left + sum(self.wrong.values())


def make_classes(trace: Sequence[RequestLengths], n_classes: int, dice: random.Random) -> list[Request]:
    """Requests with lengths drawn from the trace."""
    shared = [dice.choices(TOKEN_IDS, k=SHARED_TOKENS) for _ in range(4)]
    classes = []
    for index in range(n_classes):
        lengths = dice.choice(trace)
        beginning = shared[index // 2 % 4] if index % 2 else []
        own = dice.choices(TOKEN_IDS, k=max(1, lengths.prompt_tokens - len(beginning)))
        classes.append(Request(beginning + own, lengths.output_tokens, index if index % 4 > 1 else None))
    return classes


class Soak:
    """One run against one server."""

    def __init__(
        self, server: ServerProcess, model: str, classes: Sequence[Request], leavers: float, n_warm: int
    ) -> None:
        self.server = server
        self.n_warm = n_warm
        self.model = model
        self.classes = classes
        self.leavers = leavers
        self.expected: list[Expected] = []
        self.tally = Tally()

    async def learn(self) -> None:
        """Learn each class's right answer by asking for it alone."""
        connection = await raw_http.Connection.open(self.server.port)
        for request in self.classes:
            reply = await connection.ask("POST", "/v1/completions", request.body(self.model))
            if reply.status != 200:
                raise SystemExit(f"a request alone is answered with {reply.status}: {reply.body.decode()}")
            self.expected.append(_expected(reply.json()))
        connection.abort()

    async def run(self, at_s: Sequence[float], connections: int, dice: random.Random) -> None:
        """A request at each of these times, unless all connections are busy then."""
        plan = iter([(when, dice.randrange(len(self.classes)), dice.random()) for when in at_s])
        began = time.monotonic()

        async def work() -> None:
            connection = None
            for when, index, die in plan:  # shared by all workers
                await asyncio.sleep(max(0.0, began + when - time.monotonic()))
                if connection is None:
                    connection = await raw_http.Connection.open(self.server.port)
                try:
                    if not await self._one(connection, index, die):
                        connection = None
                except (OSError, ValueError, KeyError) as error:
                    self.tally.wrong[f"{type(error).__name__}: {error}"] += 1
                    connection = None
            if connection is not None:
                connection.abort()

        watching = asyncio.create_task(self._watch(len(at_s)))
        await asyncio.gather(*(work() for _ in range(connections)))
        watching.cancel()

    async def _one(self, connection: raw_http.Connection, index: int, die: float) -> bool:
        """Send one request until it is taken. False: the connection is of no more use."""
        body = self.classes[index].body(self.model)
        leaves, streamed = die < self.leavers, die < self.leavers or die > 0.5
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        for _ in range(RETRIES):
            await connection.send("POST", "/v1/completions", body)
            status, headers = await connection.head()
            if status == 200 and leaves:
                connection.abort()
                self.tally.n_left += 1
                return False
            if status == 200 and streamed:
                said = raw_http.Streamed()
                async for event in connection.events(headers):
                    said.take(event)
                self._judge(index, _streamed(said))
                return True
            content = b"".join([piece async for piece in connection.pieces(headers)])
            reply = raw_http.Reply(status, headers, content)
            if status != 429:
                self._judge(index, _expected(reply.json()) if status == 200 else f"status {status}")
                return True
            self.tally.n_refused += 1
            await asyncio.sleep(min(1.0, float(headers["retry-after"])))
        self.tally.wrong["refused again and again"] += 1
        return True

    def _judge(self, index: int, answer: Expected | str) -> None:
        if answer == self.expected[index]:
            self.tally.n_right += 1
        else:
            kind = answer if isinstance(answer, str) else "another answer than alone"
            self.tally.wrong[kind] += 1

    async def _watch(self, n_requests: int) -> None:
        """Sample memory; tell how far it is at every tenth."""
        told = 0
        while True:
            tally = self.tally
            metrics = read_metrics(await raw_http.ask(self.server.port, "GET", "/metrics"))
            tally.blocks.append((tally.n_ended, metrics["phasewise_python_blocks"]))
            if "phasewise_malloc_bytes" in metrics:
                tally.malloc_bytes.append((tally.n_ended, metrics["phasewise_malloc_bytes"]))
            if tally.n_ended * 10 // n_requests > told:
                told = tally.n_ended * 10 // n_requests
                print(
                    f"  {tally.n_ended} of {n_requests}: {sum(tally.wrong.values())} wrong,"
                    f" {tally.n_refused} refusals, {self.server.rss_mib():.1f} MiB",
                    flush=True,
                )
            await asyncio.sleep(0.5)


def _expected(answer: dict[str, Any]) -> Expected:
    (choice,) = answer["choices"]
    return Expected(choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])


def _streamed(said: raw_http.Streamed) -> Expected | str:
    if said.errors or said.n_done != 1 or len(said.finish_reasons) != 1 or said.usage is None:
        return f"a stream with errors {said.errors}, {said.n_done} ends, {said.finish_reasons}"
    return Expected(said.text, said.finish_reasons[0], said.usage["completion_tokens"])


def arrivals(trace: Sequence[RequestLengths], n_requests: int, within_s: float) -> list[float]:
    """The trace's own times, again and again, in `within_s` seconds; evenly where it states none."""
    times_s = [
        index if lengths.arrival_s is None else lengths.arrival_s for index, lengths in enumerate(trace)
    ]
    span = times_s[-1] or 1.0
    rounds = (number * span + time_s for number in itertools.count() for time_s in times_s)
    taken = list(itertools.islice(rounds, n_requests))
    return [time_s * within_s / (taken[-1] or 1.0) for time_s in taken]


def scaled(trace: Sequence[RequestLengths], prompts: float, answers: float) -> list[RequestLengths]:
    """With prompts and answers shortened by this factor, to one token at least."""
    return [
        RequestLengths(
            math.ceil(lengths.prompt_tokens / prompts),
            math.ceil(lengths.output_tokens / answers),
            lengths.arrival_s,
        )
        for lengths in trace
    ]


def verdict(soak: Soak, n_requests: int, before: dict[str, float]) -> list[tuple[bool, str]]:
    """The laws of a run: for each, whether it holds, and a line that tells what was found."""
    tally, server = soak.tally, soak.server
    server.wait_until(lambda: _busy(server.metrics()) == 0, 30, "does not come to rest")
    after = server.metrics()
    ended = _ended(after) - _ended(before)
    wrong = ", ".join(f"{count} x {kind}" for kind, count in tally.wrong.most_common(5))
    return [
        (
            tally.n_right + tally.n_left == n_requests,
            f"{tally.n_right} of {n_requests} answers are what they must be, {tally.n_left} clients left,"
            f" {tally.n_refused} refusals (429) were sent again{'; wrong: ' + wrong if wrong else ''}",
        ),
        (ended == n_requests, f"the server ended {ended:.0f} requests, none lost and none twice"),
        (
            after["phasewise_kv_slots_used"] == 0,
            f"{after['phasewise_kv_slots_used']:.0f} KV slots in use at the end; the pool was checked after"
            " every step",
        ),
        _kept(soak, "blocks of Python's memory", tally.blocks, 1),
        *([_kept(soak, "bytes of malloc's", tally.malloc_bytes, 32)] if tally.malloc_bytes else []),
    ]


def _kept(
    soak: Soak, what: str, given_out: Sequence[tuple[float, float]], least_block: float
) -> tuple[bool, str]:
    """The slope of what an allocator has given out, by requests ended after the warm part."""
    n_ended, held = np.array([sample for sample in given_out if sample[0] >= soak.n_warm]).reshape(-1, 2).T
    if len(set(n_ended)) < LEAST_SAMPLES:
        return False, f"{what}: {len(set(n_ended))} samples tell no slope; {LEAST_SAMPLES} at least"
    slope = float(np.polyfit(n_ended, held, 1)[0])
    return (
        slope < least_block,
        f"{held[-1]:.0f} {what} given out; after the first {soak.n_warm} requests {slope:+.3f} for each"
        f" (nothing kept: below {least_block})",
    )


def _busy(metrics: dict[str, float]) -> float:
    return metrics["phasewise_requests_running"] + metrics["phasewise_requests_waiting"]


def _ended(metrics: dict[str, float]) -> float:
    return sum(n for name, n in metrics.items() if name.startswith("phasewise_requests_total"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"`{TINY}`: a small random one, in float32")
    parser.add_argument(
        "--trace", required=True, help="Azure's CSV, or lengths such as lognormal:256,0.9/24,0.7"
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="how long the trace's times are made to last"
    )
    parser.add_argument(
        "--scale", type=float, default=16.0, help="factor by which prompts are shorter than the trace's"
    )
    parser.add_argument("--answer-scale", type=float, default=2.0, help="the same for answers")
    parser.add_argument("--kv-budget", help="[default: 16M for the tiny model, else 128M]")
    parser.add_argument("--classes", type=int, default=256)
    parser.add_argument("--connections", type=int, default=128)
    parser.add_argument("--leavers", type=float, default=0.01, help="share of clients that leave")
    parser.add_argument(
        "--warm", type=float, default=0.25, help="share of the requests before memory is held to be flat"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="further options of `phasewise serve`, after --")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    leave_no_server()
    dice = random.Random(asked.seed)
    trace = scaled(load_trace(asked.trace, asked.requests), asked.scale, asked.answer_scale)
    at_s = arrivals(trace, asked.requests, asked.minutes * 60)
    budget = asked.kv_budget or ("16M" if asked.model == TINY else "128M")
    with tempfile.TemporaryDirectory() as folder:
        model = model_reference(asked.model, Path(folder))
        environment = {
            "PHASEWISE_CHECK": "1",
            "PHASEWISE_DB": f"{folder}/tuning.db",
            **own_cache(asked.model, Path(folder)),
        }
        with ServerProcess(model, "--kv-budget", budget, *asked.serve, environment=environment) as server:
            classes, n_warm = make_classes(trace, asked.classes, dice), int(asked.warm * asked.requests)
            soak = Soak(server, asked.model, classes, asked.leavers, n_warm)
            asyncio.run(soak.learn())
            print(
                f"{asked.model}: {asked.requests} requests of {asked.classes} classes, computed alone before;"
                f" {len(set(soak.expected))} different answers",
                flush=True,
            )
            before, began = server.metrics(), time.monotonic()
            asyncio.run(soak.run(at_s, asked.connections, dice))
            print(f"{time.monotonic() - began:.0f} s")
            laws = verdict(soak, asked.requests, before)
    for holds, text in laws:
        print(f"{'ok  ' if holds else 'FAIL'} {text}")
    return 0 if all(holds for holds, _ in laws) else 1


if __name__ == "__main__":
    sys.exit(main())
