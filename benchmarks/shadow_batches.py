"""A batch in the shadow of interactive requests, by simulation: what it costs them and what it gets.

    python benchmarks/shadow_batches.py                       # two machines at a load of 0.7
    python benchmarks/shadow_batches.py --load 0.5,0.7,0.9 --requests 1200

The production scheduler runs on simulated time. A decode step of a machine takes `fixed + rows * each`, its
prompts so much a token. Lengths are lognormal:220,0.5/160,0.5. Interactive requests come as a Poisson process
at a share of the closed loop's rate (64 clients); then the same ones again, beside a batch of which 64 lines
are always in progress. Ratios: with the batch over without. Batch: its requests a second over the rest of the
rate.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
from typer import Option

from benchmarks.harness import Yielded, commands
from phasewise.cluster.simulated.machines import EngineSettings, ProductionMachine
from phasewise.cluster.simulated.steps import Curve, StepTimes
from phasewise.cluster.simulated.timeline import Timeline
from phasewise.serving.scheduling.request import Request, SchedulerLimits

CONTEXT, PLACES, SLOTS, PROMISE_MS = 4096, 32, 60_000, 100.0
CLIENTS = 64
LONGEST = 1500


def machine(fixed_s: float, row_s: float, token_s: float) -> StepTimes:
    decode = [(rows, fixed_s + rows * row_s) for rows in (1, 32, 64)]
    prompts = [(0, 0.002), (512, 0.002 + 512 * token_s)]
    return StepTimes(Curve(prompts), Curve([(0, 0.0), (1, 0.0)]), Curve(decode))


MACHINES = {
    "default model": machine(0.004, 0.00062, 0.00052),
    "bound by memory": machine(0.010, 0.0003, 0.0005),
}


class Lengths(NamedTuple):
    prompt: int
    answer: int


@dataclass
class Life:
    """When a request was sent, got its first token and its last."""

    lengths: Lengths
    sent_s: float
    first_s: float = math.inf
    ended_s: float = math.inf


@dataclass
class Server:
    """One machine, its clients and the lives of their requests. An observer of the machine."""

    steps: StepTimes
    lives: dict[str, Life] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.time = Timeline()
        limits = SchedulerLimits(CONTEXT, max_sequences=PLACES, prefix_reuse=True)
        self.machine = ProductionMachine(
            0, self.steps, EngineSettings(limits, SLOTS, PROMISE_MS), self.time, self
        )
        self._loops: dict[str, Iterator[Lengths]] = {}

    def send(self, kind: str, lengths: Lengths) -> None:
        """A request whose prompt is like no other. kind: `batch` runs in shadow."""
        name, first = f"{kind}-{len(self.lives)}", 10_000 * len(self.lives)
        self.lives[name] = Life(lengths, self.time.now_s)
        prompt = range(first, first + lengths.prompt)
        self.machine.submit(Request(name, prompt, lengths.answer, in_shadow=kind == "batch"))

    def keep_asking(self, kind: str, lengths: Iterator[Lengths]) -> None:
        """Clients that send the next request as soon as one is answered."""
        self._loops[kind] = lengths
        for number in range(CLIENTS):
            self.time.at(0.001 * number, partial(self._ask_next, kind))

    def _ask_next(self, kind: str) -> None:
        lengths = next(self._loops[kind], None)
        if lengths is not None:
            self.send(kind, lengths)

    def of(self, kind: str) -> list[Life]:
        return [life for name, life in self.lives.items() if name.startswith(kind)]

    def prompt_step_begins(self, _request_id: str) -> None: ...
    def prompt_computed(self, _request_id: str) -> None: ...
    def block_granted(self, _request_id: str) -> None: ...

    def token_made(self, request_id: str, n: int, *, is_last: bool) -> None:
        life = self.lives[request_id]
        if n == 1:
            life.first_s = self.time.now_s
        if is_last:
            life.ended_s = self.time.now_s
            kind = request_id.partition("-")[0]
            if kind in self._loops:
                self.time.at(self.time.now_s, partial(self._ask_next, kind))


def drawn(seed: int, n: int) -> list[Lengths]:
    rng = random.Random(seed)

    def length(median: float) -> int:
        return max(2, min(LONGEST, round(median * math.exp(0.5 * rng.gauss(0, 1)))))

    return [Lengths(length(220), length(160)) for _ in range(n)]


def rate_of(steps: StepTimes, lengths: Sequence[Lengths]) -> float:
    """Requests a second of a closed loop, without its beginning and its end."""
    server = Server(steps)
    server.keep_asking("interactive", iter(lengths))
    server.time.run()
    ends = sorted(life.ended_s for life in server.of("interactive"))
    first, last = len(ends) // 10, len(ends) * 9 // 10
    return (last - first) / (ends[last] - ends[first])


def served(
    steps: StepTimes, arrivals: Iterable[tuple[float, Lengths]], batch: Iterator[Lengths] | None
) -> Server:
    """All arrivals answered; the batch ends with the last of them."""
    server = Server(steps)
    last_s = 0.0
    for last_s, lengths in arrivals:
        server.time.at(last_s, partial(server.send, "interactive", lengths))
    if batch is not None:
        server.keep_asking("batch", itertools.takewhile(lambda _: server.time.now_s < last_s, batch))
    server.time.run()
    return server


def percentiles(lives: Sequence[Life]) -> dict[str, float]:
    """P90 of TTFT and TPOT, and the median of TPOT, in seconds."""
    first = [life.first_s - life.sent_s for life in lives]
    each = [(life.ended_s - life.first_s) / (life.lengths.answer - 1) for life in lives]
    return {
        "TTFT P90": float(np.percentile(first, 90)),
        "TPOT P90": float(np.percentile(each, 90)),
        "TPOT P50": float(np.percentile(each, 50)),
    }


def shadow_batches(
    load: Annotated[str, Option(help="shares of the closed loop's rate")] = "0.7",
    requests: Annotated[int, Option(help="interactive ones")] = 800,
    seed: int = 1,
) -> Yielded:
    for name, steps in MACHINES.items():
        lengths = drawn(seed, requests)
        capacity = rate_of(steps, lengths[: requests // 2])
        for share in map(float, load.split(",")):
            rng = random.Random(seed + 7)
            gaps = (rng.expovariate(share * capacity) for _ in lengths)
            arrivals = list(zip(itertools.accumulate(gaps), lengths, strict=True))
            alone = percentiles(served(steps, arrivals, None).of("interactive"))
            both = served(steps, arrivals, itertools.cycle(drawn(99, 2000)))
            beside = percentiles(both.of("interactive"))
            begin_s, end_s = arrivals[-1][0] / 10, arrivals[-1][0]
            ended = [life.lengths for life in both.of("batch") if begin_s < life.ended_s <= end_s]
            each = sum(map(sum, lengths)) / len(lengths)
            batch = sum(map(sum, ended)) / each / (end_s - begin_s)
            yield {
                "machine": name,
                "load": share,
                **{figure: beside[figure] / alone[figure] for figure in alone},
                "batch over idle": batch / ((1 - share) * capacity),
            }


app = commands(__doc__, shadow_batches)

if __name__ == "__main__":
    app()
