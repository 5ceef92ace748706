"""Overload of the embedding queues on simulated time, with devices and a front that are as late as drawn.

Everything between the arrival of a request and the end of its answer is the production client's, but for the
workers and the noise.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from phasewise.serving.embedding.client import Asker, EmbeddingClient
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.lateness import FIRST_SHARE
from phasewise.serving.embedding.pace import KEPT
from phasewise.serving.embedding.protocol import Floats, inputs_from_bytes
from phasewise.serving.embedding.queues import CPU_RANK, UNLIMITED, Depth, DeviceQueue, QueueManager
from phasewise.serving.errors import QueueFull
from tests.support.simulated_loop import SimulatedLoop, run_simulated

LENGTH = 75


@dataclass(frozen=True)
class Noise:
    """The noise to draw. Shares are of a batch's time; seconds of stalls are drawn evenly up to these."""

    spread: float = 0.05
    """Sigma of a batch's time (lognormal)."""
    stall_chance: float = 0.0
    stall_s: float = 0.0
    slow: float = 1.0
    """A device takes so many times as long in every other period."""
    period_s: float = 10.0
    freeze_every_s: float = 0.0
    """The mean time between two freezes of the front; 0: never."""
    freeze_s: float = 0.0
    burst: float = 1.0
    """In a quarter of the seconds so many times as many requests come."""


@dataclass
class NoisyWorker:
    """Batches one after the other, `batch_s + tokens * s_per_token` each, and what `noise` adds."""

    batch_s: float
    s_per_token: float
    noise: Noise
    rng: random.Random
    busy_s: float = 0.0
    seen: list[int] = field(default_factory=list)
    """The first token of every input."""

    async def attach(self) -> None:
        self._turn = asyncio.Lock()

    async def embed(self, body: bytes) -> Floats:
        inputs = inputs_from_bytes(body)
        self.seen += [tokens.ids[0] for tokens in inputs]
        async with self._turn:
            taken_s = self._drawn_s(sum(len(tokens.ids) for tokens in inputs))
            await asyncio.sleep(taken_s)
            self.busy_s += taken_s
        return np.ones((len(inputs), 1), np.float32)

    def _drawn_s(self, tokens: int) -> float:
        is_slow = asyncio.get_running_loop().time() // self.noise.period_s % 2 == 1
        taken_s = self.batch_s + tokens * self.s_per_token * (self.noise.slow if is_slow else 1.0)
        taken_s *= self.rng.lognormvariate(0, self.noise.spread)
        if self.rng.random() < self.noise.stall_chance:
            taken_s += self.rng.uniform(0, self.noise.stall_s)
        return taken_s

    async def lost(self) -> None:
        await asyncio.Event().wait()

    def end_now(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ModelledLane:
    """A device, and what its plan knows: a batch of `tokens` takes `batch_s + tokens * s_per_token`."""

    name: str
    batch_s: float
    s_per_token: float

    def queue(self, slo_s: float) -> DeviceQueue:
        """The queue of a plan: it holds what is computed in time."""
        tokens = int((slo_s * (1 - KEPT - FIRST_SHARE) - self.batch_s) / self.s_per_token)
        depth = Depth(tokens // LENGTH, tokens)
        if self.name.startswith("cpu"):  # whose plan does not say what a batch takes
            return DeviceQueue(self.name, CPU_RANK, depth)
        return DeviceQueue(self.name, 0, depth, batch_s=self.batch_s)


SLO_S, SECONDS = 1.0, 60.0
CPU = ModelledLane("cpu:0", 0.005, 5e-4)
ACCELERATOR = ModelledLane("exec:0", 0.1, 2e-4)
DEVICES = {
    "two instances": [CPU, ModelledLane("cpu:1", 0.005, 5e-4)],
    "an accelerator and the CPU": [ACCELERATOR, CPU],
}
NOISES = {
    "all at once": Noise(0.1, 0.005, 0.3, slow=2.0, freeze_every_s=5.0, freeze_s=0.2, burst=3.0),
    "exact": Noise(0.0),
    "stalls": Noise(0.1, stall_chance=0.005, stall_s=0.4),
    "a pace that halves": Noise(0.1, slow=2.0),
    "bursts": Noise(0.1, burst=5.0),
    "a front that stands still": Noise(0.1, freeze_every_s=4.0, freeze_s=0.3),
}


@dataclass(frozen=True)
class Overload:
    """The outcome. `latencies_s`: of what was accepted; `refused_s`: time until each refusal."""

    latencies_s: list[float]
    refused_s: list[float]
    n_sent: int
    n_computed: dict[int, int]
    """The number of times that each input was computed."""
    busy: float
    """The share of the time in which devices computed."""

    def percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.latencies_s, percent))

    def share_within(self, slo_s: float) -> float:
        return sum(taken_s <= slo_s for taken_s in self.latencies_s) / len(self.latencies_s)

    @property
    def median_refusal_s(self) -> float:
        return float(np.median(self.refused_s)) if self.refused_s else 0.0


def overload(
    devices: list[ModelledLane],
    noise: Noise,
    *,
    seed: int,
    slo_s: float,
    seconds: float,
    times: float = 3.0,
    is_planned: bool = True,
) -> Overload:
    """`times` as many requests as the devices can compute, at random (Poisson).

    is_planned: False for devices whose depths no plan knows.
    """
    depths = None if is_planned else [UNLIMITED] * len(devices)
    return run_simulated(_overload(devices, noise, random.Random(seed), slo_s, seconds, times, depths))


def client_over(
    devices: Sequence[ModelledLane],
    noise: Noise,
    rng: random.Random,
    slo_s: float | None,
    depths: Sequence[Depth] | None = None,
) -> tuple[EmbeddingClient, list[NoisyWorker]]:
    """A client over workers of these devices. slo_s: None promises nothing. depths: not their plans'."""
    workers = [
        NoisyWorker(device.batch_s, device.s_per_token, noise, random.Random(rng.random()))
        for device in devices
    ]
    queues = [device.queue(slo_s or SLO_S) for device in devices]
    for queue, depth in zip(queues, depths or (), strict=depths is not None):
        queue.depth = depth
    starts = [(lambda each=each: each, each) for each in workers]
    return EmbeddingClient(QueueManager(queues), starts, slo_s), workers


async def _overload(
    devices: list[ModelledLane],
    noise: Noise,
    rng: random.Random,
    slo_s: float,
    seconds: float,
    times: float,
    depths: Sequence[Depth] | None,
) -> Overload:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    client, workers = client_over(devices, noise, rng, slo_s, depths)
    client.attach(loop)
    await asyncio.sleep(0)
    latencies_s, refused_s = list[float](), list[float]()

    async def ask(number: int, arrived_s: float) -> None:
        def at_end(call: Callable[[], None]) -> None:
            loop.call_soon(call)
            latencies_s.append(loop.time() - arrived_s)

        try:
            await client.embed([Tokens([number] * LENGTH)], Asker("", arrived_s, at_end))
        except QueueFull:
            refused_s.append(loop.time() - arrived_s)

    freezing = asyncio.ensure_future(_freezes(loop, noise, rng)) if noise.freeze_every_s else None
    capacity = sum(1 / (LENGTH * device.s_per_token) for device in devices)
    asked, at_s = list[asyncio.Future[None]](), 0.0
    while (at_s := at_s + rng.expovariate(_rate(times * capacity, noise, at_s))) < seconds:
        await asyncio.sleep(max(0.0, at_s - loop.time()))
        asked.append(asyncio.ensure_future(ask(len(asked), at_s)))
    await asyncio.gather(*asked)
    if freezing is not None:
        freezing.cancel()
    computed = dict[int, int]()
    for worker in workers:
        for number in worker.seen:
            computed[number] = computed.get(number, 0) + 1
    assert client.n_live == 0
    assert all(lane.queue.inputs == lane.queue.tokens == 0 for lane in client.lanes())
    busy = sum(worker.busy_s for worker in workers) / (seconds * len(workers))
    return Overload(latencies_s, refused_s, len(asked), computed, busy)


async def _freezes(loop: SimulatedLoop, noise: Noise, rng: random.Random) -> None:
    """At times the front does not run, while devices do."""
    while True:
        await asyncio.sleep(rng.expovariate(1 / noise.freeze_every_s))
        loop.skip(rng.uniform(0, noise.freeze_s))


def _rate(mean: float, noise: Noise, at_s: float) -> float:
    """Requests a second at this instant."""
    calm = 4 * mean / (3 + noise.burst)
    return calm * noise.burst if int(at_s) % 4 == 0 else calm
