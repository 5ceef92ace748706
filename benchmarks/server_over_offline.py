"""The rate that keeps promises over the rate without any, by simulation: what limits it on a machine.

    python benchmarks/server_over_offline.py                      # a 1.07 B file in Q4_K_M on two cores
    python benchmarks/server_over_offline.py --token-ms 0.52 --fixed-ms 4 --row-ms 0.62    # the default model

Lengths are lognormal:220,0.5/160,0.5, promises TTFT 2 s and TPOT 200 ms at P90. `prompts alone`: a machine
that computes prompts one after the other and answers in no time, which no scheduler that goes by arrival can
pass. Then the production scheduler, paced to several promises of time per token and in each waiting order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Yielded, commands
from benchmarks.shadow_batches import CONTEXT, PLACES, SLOTS, Lengths, Server, drawn, machine, rate_of
from phasewise.cluster.simulated.machines import EngineSettings, ProductionMachine
from phasewise.cluster.simulated.steps import StepTimes
from phasewise.serving.scheduling.scheduler_terms import SchedulerLimits
from phasewise.serving.scheduling.waiting_line import WAITING_ORDERS

TTFT_S, TPOT_S, KEPT = 2.0, 0.2, 0.9
STEP = 0.02
"""Rates are found to within this share of the rate without promises."""

Kept = Callable[[Sequence[float], Sequence[Lengths]], float]
"""The share of requests that come at these times and keep both promises."""


def alone(token_s: float) -> Kept:
    def kept(arrivals: Sequence[float], lengths: Sequence[Lengths]) -> float:
        free_s, n_kept = 0.0, 0
        for at_s, each in zip(arrivals, lengths, strict=True):
            free_s = max(free_s, at_s) + token_s * each.prompt
            n_kept += free_s - at_s <= TTFT_S
        return n_kept / len(lengths)

    return kept


def scheduled(steps: StepTimes, tpot_ms: float, order: str) -> Kept:
    def kept(arrivals: Sequence[float], lengths: Sequence[Lengths]) -> float:
        server = Server(steps)
        limits = SchedulerLimits(CONTEXT, max_sequences=PLACES, prefix_reuse=True, waiting_order=order)
        settings = EngineSettings(limits, SLOTS, tpot_ms)
        server.machine = ProductionMachine(0, steps, settings, server.time, server)
        for at_s, each in zip(arrivals, lengths, strict=True):
            server.time.at(at_s, lambda each=each: server.send("interactive", each))
        server.time.run()
        lives = server.of("interactive")
        return float(
            np.mean(
                [
                    life.first_s - life.sent_s <= TTFT_S
                    and (life.ended_s - life.first_s) / (life.lengths.answer - 1) <= TPOT_S
                    for life in lives
                ]
            )
        )

    return kept


def highest(kept: Kept, offline: float, lengths: Sequence[Lengths]) -> float:
    """The highest rate that keeps the promises, as a share of the rate without them."""
    low, high = 0.0, 1.0
    while high - low > STEP:
        share = (low + high) / 2
        rng = random.Random(7)
        gaps = np.array([rng.expovariate(share * offline) for _ in lengths])
        if kept(np.cumsum(gaps).tolist(), lengths) >= KEPT:
            low = share
        else:
            high = share
    return low


def server_over_offline(
    token_ms: Annotated[float, Option(help="of a prompt")] = 4.0,
    fixed_ms: Annotated[float, Option(help="of a decode step")] = 15.0,
    row_ms: Annotated[float, Option(help="of each of its rows")] = 3.5,
    requests: int = 400,
) -> Yielded:
    steps, lengths = machine(fixed_ms / 1e3, row_ms / 1e3, token_ms / 1e3), drawn(1, requests)
    offline = rate_of(steps, lengths)
    yield f"without promises: {offline:.3g} requests/s"
    yield {"scheduler": "prompts alone", "over offline": highest(alone(token_ms / 1e3), offline, lengths)}
    for tpot_ms in (50.0, 100.0, 200.0):
        for order in WAITING_ORDERS:
            over_offline = highest(scheduled(steps, tpot_ms, order), offline, lengths)
            yield {"scheduler": f"paced to {tpot_ms:g} ms, {order}", "over offline": over_offline}


app = commands(__doc__, server_over_offline)

if __name__ == "__main__":
    app()
