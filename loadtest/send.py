"""Sends a load: at given instants, or by clients that wait for their answers, until its end or a stop.

Instants follow vLLM's benchmark at its burstiness of 1: a Poisson process, scaled so that the last request
comes at n/rate.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

from phasewise.loadtest.client import LoadClient
from phasewise.loadtest.metrics import FailureKind, Measured, RequestOutcome
from phasewise.loadtest.prompts import Prompts
from phasewise.tuner.config.lengths import Trace

MOST_WAIT_S = 60.0
"""The longest pause of a closed-loop client after a Retry-After header."""

AFTER_FAILURE_S = 0.2
"""Seconds that a closed-loop client pauses after a failure without a Retry-After header."""

Limit: TypeAlias = Callable[[int], float | None]
"""Maps an answer's number of tokens to its time limit in seconds; None: the client's own limit."""


@dataclass(frozen=True, slots=True)
class RequestPace:
    """The times of requests. Without `rate` and `instants_s` each client waits for its answer first.

    rate: requests/s. instants_s: arrivals of a trace in seconds; `rate` does not apply to them.
    most_at_once: most requests in flight, None for no limit; in a closed loop the number of clients.
    """

    rate: float | None
    instants_s: Sequence[float] | None = None
    most_at_once: int | None = None

    @property
    def is_closed_loop(self) -> bool:
        return self.rate is None and self.instants_s is None

    def arrivals_s(self, count: int, seed: int) -> list[float]:
        """Draw `count` ascending arrival times, in seconds from the start of the load."""
        if self.instants_s is not None:
            return list(self.instants_s)
        if self.rate is None:
            return [0.0] * count
        return poisson_arrivals_s(self.rate, count, random.Random(seed))


def poisson_arrivals_s(rate: float, count: int, rng: random.Random) -> list[float]:
    """Draw ascending arrival times (s) of a Poisson process, scaled so that the last is count / rate."""
    instants_s = list(accumulate(rng.expovariate(rate) for _ in range(count)))
    if not instants_s or instants_s[-1] <= 0:
        return [0.0] * count
    scale = count / rate / instants_s[-1]
    return [instant_s * scale for instant_s in instants_s]


@dataclass
class RequestLoad:
    """Requests to send, in order, and their pace. `seed` draws the arrivals; prompts have their own seed."""

    requests: Trace
    pace: RequestPace
    prompts: Prompts
    seed: int = 0
    first_index: int = 0
    """Index of the first prompt; loads of one test use different ranges, so that they share no prompt."""
    duration_s: float = math.inf
    """Seconds from the start after which no request is sent."""
    limit_s: Limit = field(default=lambda _tokens: None)
    heeds_refusals: bool = True
    """True if a refused client of a closed loop pauses, for as long as the server says."""


Observe: TypeAlias = Callable[[RequestOutcome], None]
"""Called with every outcome."""


async def run_load(
    client: LoadClient, load: RequestLoad, stop: asyncio.Event, observe: Observe = lambda _outcome: None
) -> Measured:
    """Send the load and measure it.

    When `stop` is set, nothing more is sent and requests in flight are cut off.
    """
    running = _Running(client, load, stop, observe)
    cpu_s, started_s = time.process_time(), time.perf_counter()
    await running.run(started_s)
    ended_s = time.perf_counter()
    outcomes = [replace(outcome, start_s=outcome.start_s - started_s) for outcome in running.outcomes]
    return Measured(outcomes, ended_s - started_s, time.process_time() - cpu_s)


@dataclass
class _Running:
    """One load under way."""

    client: LoadClient
    load: RequestLoad
    stop: asyncio.Event
    observe: Observe
    outcomes: list[RequestOutcome] = field(default_factory=list)
    tasks: set[asyncio.Task[RequestOutcome]] = field(default_factory=set)

    async def run(self, started_s: float) -> None:
        send = self._closed_loop if self.load.pace.is_closed_loop else self._open_loop
        work = asyncio.ensure_future(send(started_s))
        stopping = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if work.done():
            work.result()
        for task in (work, *self.tasks):
            task.cancel()
        await asyncio.gather(work, *self.tasks, return_exceptions=True)

    async def _open_loop(self, started_s: float) -> None:
        """Send each request at its instant, whether or not earlier ones have ended."""
        load = self.load
        gate = asyncio.Semaphore(load.pace.most_at_once or len(load.requests) or 1)
        instants_s = load.pace.arrivals_s(len(load.requests), load.seed)
        for index, at_s in enumerate(instants_s):
            if at_s > load.duration_s:
                break
            wait_s = started_s + at_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await gate.acquire()
            task = asyncio.create_task(self._one(index))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            task.add_done_callback(lambda _: gate.release())
        while self.tasks:
            await asyncio.wait(self.tasks)

    async def _closed_loop(self, started_s: float) -> None:
        """Run `most_at_once` clients, each with one request at a time, until no request is left."""
        waiting = deque(range(len(self.load.requests)))

        async def client() -> None:
            while waiting and time.perf_counter() - started_s <= self.load.duration_s:
                outcome = await self._one(waiting.popleft())
                if outcome.failure is not None and waiting and self.load.heeds_refusals:
                    await asyncio.sleep(min(outcome.retry_after_s or AFTER_FAILURE_S, MOST_WAIT_S))

        await asyncio.gather(*(client() for _ in range(self.load.pace.most_at_once or 1)))

    async def _one(self, index: int) -> RequestOutcome:
        load, request = self.load, self.load.requests[index]
        n_prompt, n_answer = request.prompt_tokens, request.output_tokens
        prompt = load.prompts(load.first_index + index, request)
        body = self.client.target.body(prompt, n_answer)
        begun_s = time.perf_counter()
        try:
            outcome = await self.client.send(body, n_prompt, load.limit_s(n_answer))
        except asyncio.CancelledError:
            unfinished = FailureKind.unfinished
            self.outcomes.append(RequestOutcome(begun_s, n_prompt, failure=unfinished, error="cut off"))
            raise
        outcome.number = index
        self.outcomes.append(outcome)
        self.observe(outcome)
        return outcome
