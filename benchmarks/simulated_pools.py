"""The simulator with a prompt and a token pool beside the same two instances in fact, hand-over included.

    python benchmarks/simulated_pools.py [--rate 1] [--duration 60] [--seed 0]

1. Steps of an engine on one core are timed, and the time between a prompt's end and its arrival elsewhere.
   MAPE as the Splitwise paper gives it (V-B): of steps that the curves were not made of, a fifth of all.
2. Core 0 computes prompts and core 1 answers; requests arrive at drawn times.
3. The same trace runs through `cluster.simulated.simulate`, with the front's own policy.
"""

from __future__ import annotations

import queue
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import MODEL, Yielded, commands
from benchmarks.serve_split import PATIENCE_S, SPLIT, Load, Pools, pools
from benchmarks.simulated_server import LENGTHS, MAX_SEQUENCES
from benchmarks.timed_steps import timed_steps
from phasewise.cluster.routing import Limits
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.metrics import summarise
from phasewise.cluster.simulated.recorded_steps import TimedStep, steps_of
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.cluster.simulated.steps import PromptPart, StepTimes
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.open_engine import open_engine
from phasewise.workflows.opening.open_model import open_model

PERCENTILES = (50, 90, 99)
TRAINED = 0.8
KV_BYTES = 2
"""Of a token in the simulation: slots are what counts, and copies are timed whole."""
Times = tuple[float, float, float]
"""Seconds to the first token, between tokens, and to the last."""


def simulated_pools(
    model: Annotated[str, Option()] = MODEL,
    rate: Annotated[float, Option(help="requests/s")] = 1.0,
    duration: Annotated[float, Option(help="seconds")] = 60.0,
    seed: int = 0,
) -> Yielded:
    timed, size = steps_on_one_core(model)
    yield f"{model}, MAPE of step times: " + ", ".join(
        f"{phase} {error:.1%}" for phase, error in errors_of(timed, seed).items()
    )
    arrivals = poisson(LENGTHS, rate, duration, seed)
    load = Load(model, seed)
    with pools(load.spec, SPLIT) as front:
        hand_over_s = timed_hand_over(load, front)
        measured = served(load, front, arrivals)
        divided = front.front.counts.divided
    yield f"a hand-over takes {1e3 * hand_over_s:.2f} ms after the prompt's end; {divided} were made"
    kind = MachineType(
        "one core", steps_of(timed), size.kv.slots * KV_BYTES, 0, KV_BYTES, 1, Link(1e12, hand_over_s)
    )
    kind = replace(
        kind, max_batch_tokens=size.limits.max_batch_tokens, max_sequences=MAX_SEQUENCES, tpot_ms=size.tpot_ms
    )
    spec = ClusterSpec((Pool("prompt", kind, 1), Pool("token", kind, 1)), limits=Limits())
    result = simulate(spec, arrivals)
    simulated = [(life.ttft_s, life.tbt_s, life.e2e_s) for life in result.lives]
    busy = ", ".join(f"{use.utilisation:.0%}" for use in summarise(result, None).uses)
    yield f"{len(arrivals)} requests at {rate:g}/s, the simulated pools were busy for {busy} of the time"
    for column, figure in enumerate(("TTFT", "TBT", "E2E")):
        real, model_s = (np.array([times[column] for times in of]) for of in (measured, simulated))
        longer = real > 0  # an answer of one token has no time between tokens
        each = np.abs(model_s[longer] - real[longer]) / real[longer]
        row: dict[str, object] = {"": figure}
        for p in PERCENTILES:
            pair = [1e3 * float(np.percentile(of, p)) for of in (real, model_s)]
            row |= {f"P{p}, ms": pair[0], f"simulated P{p}": f"{pair[1]:.4g} ({pair[1] / pair[0] - 1:+.1%})"}
        yield row | {"MAPE by request": f"{each.mean():.1%}"}


def steps_on_one_core(model: str) -> tuple[list[TimedStep], EngineSize]:
    opened_model = open_model(model, threads=1)
    size = EngineSize.for_many(opened_model.model, MAX_SEQUENCES, 4096, None)
    size = replace(size, limits=replace(size.limits, prefix_reuse=False), kv=replace(size.kv, touched=True))
    schedules = opened_model.schedules
    with open_engine(opened_model.model, opened_model.plans, size, schedules=schedules) as opened:
        return timed_steps(opened, 2), size


def errors_of(timed: Sequence[TimedStep], seed: int) -> dict[str, float]:
    """Mean of the relative errors at steps that the curves do not know, by phase."""
    shuffled = random.Random(seed).sample(list(timed), len(timed))
    n_trained = round(TRAINED * len(shuffled))
    steps = steps_of(shuffled[:n_trained])
    plain = [row for row in shuffled[n_trained:] if row.phase == "prefill" or row.tokens == 1]
    return {
        phase: statistics.fmean(
            abs(predicted(steps, row) - row.seconds) / row.seconds for row in plain if row.phase == phase
        )
        for phase in ("prefill", "decode")
    }


def predicted(steps: StepTimes, row: TimedStep) -> float:
    if row.phase == "prefill":
        return steps.prompts_s(row.sequences * [PromptPart(row.tokens, row.context)])
    return steps.decode_s(row.sequences, row.sequences * (row.context + 1), row.since_prefill)


def timed_hand_over(load: Load, front: Pools) -> float:
    """Median seconds from the end of a prompt's steps to its first token, sampled by the other instance."""
    late_s = []
    for _ in range(12):
        before_s = front.prefill_s
        sent_s, tokens_s = front.run(load.request(256, 2))
        late_s.append(tokens_s[0] - sent_s - (front.prefill_s - before_s))
    return max(0.0, statistics.median(late_s[2:]))


def served(load: Load, front: Pools, arrivals: Sequence[Arrival]) -> list[Times]:
    """The times of each request, sent when it arrives."""
    requests = [load.request(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals]
    begin_s = time.perf_counter()
    sent_s: dict[str, float] = {}
    for arrival, request in zip(arrivals, requests, strict=True):
        time.sleep(max(0.0, begin_s + arrival.at_s - time.perf_counter()))
        sent_s[request.request_id] = time.perf_counter()
        front.front.send(request)
    left = {request.request_id for request in requests}
    while left:
        try:
            left.discard(front.ended.get(timeout=PATIENCE_S))
        except queue.Empty:
            raise SystemExit(f"{len(left)} requests never ended") from None
    out: list[Times] = []
    for request in requests:
        at_s, own = sent_s[request.request_id], front.tokens_s[request.request_id]
        out.append((own[0] - at_s, (own[-1] - own[0]) / max(1, len(own) - 1), own[-1] - at_s))
    return out


app = commands(__doc__, simulated_pools)

if __name__ == "__main__":
    app()
